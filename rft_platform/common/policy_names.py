"""Names of policies, and the addresses of what belongs to them; section ``policies`` names all but the default one."""

DEFAULT_POLICY = "policy"  # that of section ``model``


def stored_name(stem: str, policy: str, join: str = "-") -> str:
    """The address of a policy's checkpoints, model, MLflow run or figure: ``<stem><join><policy>``.

    That of the default policy is ``stem``: people type it (``models:/<project>-<name>/3``), and other tools look for
    ``<checkpoint_root_dir>/<project>/<name>/global_step_<n>``.
    """
    return stem if policy == DEFAULT_POLICY else f"{stem}{join}{policy}"
