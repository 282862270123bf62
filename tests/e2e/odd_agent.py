"""An agent one of whose runs raises what is no Exception, and whose metric has a name that MLflow refuses."""

from rft_platform.rollout.workflow import WorkflowOutput


async def answer(task: dict, model) -> WorkflowOutput:
    """One question, one answer; one task always fails."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    if task["question"] == "1+2=":
        raise GeneratorExit
    return WorkflowOutput(response=message.get("content") or "", metrics={"tool//errors": 1.0, "../../x/..": 2.0})
