"""``python -m rft_platform.inference.transformers_engine SETTINGS``: the server process, settings as JSON."""

import sys

# transformers imports scikit-learn where it is installed, for a kind of decoding that is not used here: 1.2 s of start.
sys.modules["sklearn"] = None  # type: ignore[assignment]

from rft_platform.inference.transformers_engine.server import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
