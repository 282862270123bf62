"""Models that judge: how they are asked, what is kept of their answers, and the judges made of them."""
