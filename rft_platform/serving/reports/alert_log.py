"""Which alerts of the traffic are open, from the database's events, and whether they pause the training.

The service records when an alert begins and ends; the process that trains may run on another host, and reads it here.
"""

from rft_platform.serving.traffic import TrafficStore

ALERT, ALERT_ENDED = "alert", "alert_ended"  #: kinds of events; their detail ``limit`` names the exceeded limit
RESUMED = "training_resumed"  #: kind of the event by which a user ends the pause of all alerts that are open then


def open_alerts(store: TrafficStore) -> dict[str, str]:
    """The messages of alerts that have begun and not ended, by the name of their limit."""
    return _fold(store, acknowledge=False)


def pausing_alerts(store: TrafficStore) -> dict[str, str]:
    """The open alerts after which no user has resumed the training."""
    return _fold(store, acknowledge=True)


def resume_training(store: TrafficStore, reason: str) -> list[str]:
    """End the pause of the alerts that are open now; returns their names. A later alert pauses the training again."""
    pausing = sorted(pausing_alerts(store))
    store.log(RESUMED, reason, limits=pausing)
    return pausing


def _fold(store: TrafficStore, *, acknowledge: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in store.events_of((ALERT, ALERT_ENDED, RESUMED)):
        if event.kind == ALERT:
            found[event.details["limit"]] = event.reason
        elif event.kind == ALERT_ENDED:
            found.pop(event.details["limit"], None)
        elif acknowledge:
            found.clear()
    return found
