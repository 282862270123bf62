"""A judge whose rewards differ even on an untrained model: the share of digits in the answer."""


def digit_share(task: dict, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def share_of_ones(task: dict, response: str) -> float:
    return response.count("1") / max(len(response), 1)
