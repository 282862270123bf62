"""``python -m rft_platform.inference.vllm_engine SETTINGS``: start vLLM's server; the settings are JSON.

This module runs in the interpreter that has vLLM. It replaces its process (exec) by vLLM's own program, which loads
this package through ``--middleware`` and ``--worker-extension-cls``.
"""

import os
import sys

from rft_platform.cluster.local.service_process import EXIT_USER_ERROR, ServiceProcess
from rft_platform.common.errors import UserError
from rft_platform.inference.vllm_engine.server_settings import ServerSettings
from rft_platform.inference.vllm_engine.versions import environment, required_in, server_program
from rft_platform.inference.vllm_engine.worker import SERVER_PID


def main(arguments: list[str]) -> None:
    """Replace this process by vLLM's server; exit code 2 and one line on standard error for wrong settings."""
    settings = ServerSettings.from_launcher(arguments[0])
    try:
        vllm, service = required_in(sys.executable), ServiceProcess.from_environment("engine-vllm")
        program = server_program(vllm, settings.model_path)
        command = [sys.executable, "-P", *program, *settings.arguments(vllm, service.host, service.port)]
    except UserError as error:
        one_line = " ".join(str(error).split())
        print(f"error: {one_line}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    for name, value in environment(vllm, settings.threads).items():
        os.environ.setdefault(name, value)
    os.environ[SERVER_PID] = str(os.getpid())
    settings.to_environment()
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
