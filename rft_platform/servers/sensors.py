"""Turn on the sensors through the webserver's GraphQL API, as their switches in the interface do."""

import time

from rft_platform.errors import RftError

SENSORS = ("next_round_sensor", "experience_threshold_sensor")

_REPOSITORY = {"repositoryLocationName": "rft_platform", "repositoryName": "__repository__"}
_START = """
mutation($sensor: SensorSelector!) {
  startSensor(sensorSelector: $sensor) { __typename ... on PythonError { message } }
}"""
_TIMEOUT_S = 60.0
_POLL_S = 0.5


def start_sensors(url: str, token: str) -> None:
    """Turn on the round sensors at ``url``; raises RftError if that does not succeed within 60 s."""
    import httpx

    deadline, headers = time.monotonic() + _TIMEOUT_S, {"Authorization": f"Bearer {token}"}
    for name in SENSORS:
        body = {"query": _START, "variables": {"sensor": {**_REPOSITORY, "sensorName": name}}}
        while True:  # the interface answers before it has loaded the code location
            try:
                said = httpx.post(f"{url}/graphql", json=body, headers=headers, timeout=30.0, trust_env=False).json()
                answer = (said.get("data") or {}).get("startSensor") or {}
            except (httpx.HTTPError, ValueError) as error:
                said, answer = {"error": str(error)}, {}
            if answer.get("__typename") == "Sensor":
                break
            if time.monotonic() > deadline:
                raise RftError(f"{name} could not be turned on at {url}: {said}; turn it on under Automation there")
            time.sleep(_POLL_S)
