"""``python -m rft_platform.inference.transformers_engine SETTINGS``: run the server; the settings are JSON."""

import sys

from rft_platform.cluster.this_process import NOT_FOR_TRANSFORMERS, importing, keep_imports

with importing(without=NOT_FOR_TRANSFORMERS):
    import transformers.models.auto.modeling_auto  # noqa: F401

    from rft_platform.inference.transformers_engine.server import main

    keep_imports()

sys.exit(main(sys.argv[1:]))
