"""Questions to a shop's front desk, and the department that each belongs to."""

import random
from collections.abc import Sequence

DEPARTMENTS = {
    "delivery": ("Where is my parcel", "When does my order arrive", "The courier lost order", "Track my parcel"),
    "billing": (
        "I was charged twice for",
        "Send me the invoice of",
        "The price is wrong on",
        "My card was refused for",
    ),
    "returns": ("I want my money back for", "It broke after a day:", "It does not fit:", "How do I send back"),
}
HELD_OUT_ORDERS = range(100, 200)  # only the evaluation names them
ORDERS = range(200, 1000)


def ask(generator: random.Random, orders: Sequence[int] = ORDERS) -> tuple[str, str]:
    """A customer's question, and the department that it belongs to."""
    department = generator.choice(tuple(DEPARTMENTS))
    return f"{generator.choice(DEPARTMENTS[department])} {generator.choice(orders)}?", department
