"""``python -m rft_platform.inference.transformers_engine SETTINGS``: the server process, settings as JSON."""

import sys

from rft_platform.processes.collector import importing, keep_imports

# transformers imports these where they are installed, for kinds of decoding and losses that are not used here; a module
# that is None counts as not installed. It saves a quarter of the start.
for unused in ("sklearn", "scipy"):
    sys.modules[unused] = None  # type: ignore[assignment]

with importing():
    import transformers.models.auto.modeling_auto  # noqa: F401

    from rft_platform.inference.transformers_engine.server import main
keep_imports()

sys.exit(main(sys.argv[1:]))
