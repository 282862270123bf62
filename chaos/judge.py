"""A judge whose rewards vary even for an untrained model, so that every round of a scratch project trains."""


def digit_share(task: dict, response: str) -> float:
    """The share of digits in the answer."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)
