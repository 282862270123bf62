"""Task datasets: reading, mapping and checking them, and selecting batches from them."""
