"""Production calls with feedback that several tests search."""

from sqlalchemy import Engine

from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore

START = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
SCRIPT = "<script>document.title = 'broken'</script>"


def fill(engine: Engine) -> TrafficStore:
    """Four calls, a minute apart: of versions 8 and 16, by two keys, with metrics and tags."""
    store = TrafficStore(engine)
    for number in range(4):
        call = {
            "messages": [
                {"role": "system", "content": "Help."}, {"role": "user", "content": f"Order {number}? {SCRIPT}"},
            ],
            "tools": [], "response": {"role": "assistant", "content": f"Sent {number}.", "tool_calls": None},
        }  # fmt: skip
        key = "shop" if number < 3 else "bar"
        store.record([NewCall(f"m{number}", 0, call, 8 + 8 * (number // 2), 10 + number, START + 60 * number, key)])
    store.give_feedback(NewFeedback("f0", ["m0"], 1.0, tenant="shop", tags={"team": "sales", "lang": "de"}))
    store.give_feedback(NewFeedback("f1", ["m1"], 0.25, tenant="shop", tags={"team": "support"}))
    store.give_feedback(NewFeedback("f2", ["m2"], 0.5, metric="helpful", tenant="shop"))
    store.give_feedback(NewFeedback("f3", ["m1"], 0.9, metric="helpful", tenant="shop"))
    return store
