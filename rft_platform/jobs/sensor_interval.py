"""Sensor interval: short enough that a round hardly waits, long enough that ticks cost almost no processor time."""

import os

from rft_platform.common.errors import UserError

INTERVAL = "RFT_SENSOR_INTERVAL_S"
_DEFAULT_S = 10


def sensor_interval_s() -> int:
    """Seconds between two ticks of a sensor: ``RFT_SENSOR_INTERVAL_S``, or 10 by default."""
    value = os.environ.get(INTERVAL, "").strip()
    if not value:
        return _DEFAULT_S
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"{INTERVAL}={value!r}: expected a whole number of seconds of at least 1, such as 10")
    return int(value)
