"""Built-in workflows, and the auxiliary models that workflows and judges may call.

Read in this order:

- ``calculator``: a tool-using workflow; ``dialogue``: the policy talks with a simulated user; ``tool_call``: one
  call with the tools of the row; ``frozen_lake``: a game on a grid; ``environment``: an episode of any environment
  (``rollout.environments``).
- ``agentscope``: AgentScope 1's ReAct agent and chat model; ``agentscope2``: the chat model of AgentScope 2; importing
  them imports AgentScope.
- ``auxiliary``: ``AuxiliaryModel``, a served model that is neither trained nor recorded, and
  its OpenAI clients.
- ``chat_models``: wrap models as AgentScope chat models where AgentScope is installed.

The one-call workflow ``single_turn`` is in ``rollout.runner.run_rollouts``: it is executed in whole batches.
"""
