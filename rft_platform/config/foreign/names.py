"""Tables from names of Trinity-RFT to names of this platform: workflows, rewards, algorithms and their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_THINK_AND_ANSWER = (
    "Solve the user's problem. First think about it between <think> and </think>, then give the answer between "
    "<answer> and </answer>."
)
_BOXED = r"Reason step by step, and put the final answer within \boxed{}."
_THINK_AND_BOX = (
    "Solve the user's problem. First think about it between <think> and </think>, then put the final answer within "
    r"\boxed{}."
)

Judge = str | list[dict[str, Any]]

#: The requested form of the text has weight 0.2: rewards differ by as much as in Trinity-RFT.
FORM: dict[str, Any] = {"judge": "tags", "weight": 0.2, "args": {"tags": ["think", "answer"]}}
FORM_NOTE = "the form of the text adds 0.2 or 0, and 0.1 or -0.1 in Trinity-RFT: rewards are 0.1 higher than there"
_MATH_AND_FORM: Judge = [{"judge": "math", "weight": 1.0}, FORM]


@dataclass(frozen=True, slots=True)
class KnownWorkflow:
    """The built-in workflow that replaces a workflow of Trinity-RFT, and the settings that come with it."""

    workflow: str
    judge: Judge | None = None  # used if the file names no reward
    system_prompt: str | None = None  # used if the file sets no system prompt
    thinking_prompt: str | None = None  # replaces system_prompt if workflow_args has with_think: true
    arguments: Mapping[str, str | None] = field(default_factory=dict)  # new names of workflow_args; None: no effect
    note: str | None = None  # line for the user about a difference
    eval_judge: Judge | None = None  # judge of eval_tasksets; None: that of tasksets
    reads_rows: bool = False  # the workflow has its own columns: prompt and answer columns are not needed


_SIMPLE = KnownWorkflow("single_turn")
_MATH = KnownWorkflow("single_turn", _MATH_AND_FORM, _THINK_AND_ANSWER)
_MATH_BOXED = KnownWorkflow(
    "single_turn", "math", _BOXED, _THINK_AND_BOX, {"use_base": None, "with_think": None, "format_score_coef": None}
)
_REACT = KnownWorkflow("agentscope_react", "math", arguments={"max_turns": "max_iters"})
_RULER = KnownWorkflow(
    "single_turn",
    "ranking",
    eval_judge="math",
    note=(
        "the judge ranking scores the runs of a task relative to each other by the auxiliary model, as RULER does; "
        "eval_tasksets get the judge math, which compares with the answer column"
    ),
)
_RUBRIC = KnownWorkflow(
    "single_turn",
    "llm",
    note="the judge llm grades answers by the auxiliary model; judge_args.criteria are the rubrics",
)

#: 1 for exactly the expected calls.
_EXPECTED_CALLS: Judge = [
    {
        "judge": "tool_use",
        "weight": 1.0,
        "args": {
            "calls_key": "answer", "correct_tool": 0.0, "correct_args": 1.0, "tool_success": 0.0, "invalid_tool": 0.0,
            "unneeded_tool": -1.0,
        },
    }
]  # fmt: skip
_TOOL_CALL = KnownWorkflow(
    "tool_call",
    _EXPECTED_CALLS,
    note=(
        "workflow tool_call offers the row's tools through the chat template, and the judge tool_use rewards the share "
        "of the expected calls (column answer) that were made, less the share of other calls"
    ),
    reads_rows=True,
)
_FROZEN_LAKE = KnownWorkflow(
    "frozen_lake",
    arguments={"agent_max_steps": "max_steps", "env_max_steps": "max_moves", "use_multistep_prompt": None},
    note="workflow frozen_lake makes other lakes of a row's size, p and seed, and has its own prompt",
    reads_rows=True,
)

WORKFLOWS: Mapping[str, KnownWorkflow] = {
    **dict.fromkeys(("simple_workflow", "async_simple_workflow"), _SIMPLE),
    **dict.fromkeys(("on_policy_distill_workflow", "async_on_policy_distill_workflow"), _SIMPLE),
    **dict.fromkeys(("math_workflow", "async_math_workflow"), _MATH),
    **dict.fromkeys(("on_policy_distill_math_workflow", "async_on_policy_distill_math_workflow"), _MATH_BOXED),
    **dict.fromkeys(("math_boxed_workflow", "async_math_boxed_workflow"), _MATH_BOXED),
    **dict.fromkeys(("math_eval_workflow", "async_math_eval_workflow"), replace(_MATH_BOXED, thinking_prompt=None)),
    **dict.fromkeys(("math_rm_workflow", "async_math_rm_workflow"), _MATH),
    **dict.fromkeys(("math_ruler_workflow", "async_math_ruler_workflow"), _RULER),
    **dict.fromkeys(("rubric_judge_workflow", "rubric_judge_openai_workflow"), _RUBRIC),
    **dict.fromkeys(("agentscope_react_workflow", "as_react_workflow", "react_agent"), _REACT),
    **dict.fromkeys(("agentscope_react_math_workflow", "agentscopev0_react_math_workflow"), _REACT),
    **dict.fromkeys(("bots_math_boxed_workflow", "bots_ref_eval_collect_math_boxed_workflow"), _MATH_BOXED),
    **dict.fromkeys(("toolcall_workflow", "tool_call_workflow"), _TOOL_CALL),
    "frozen_lake_workflow": _FROZEN_LAKE,
    "examples.bots.workflow.bots_math_boxed_workflow.BOTSMathBoxedWorkflow": _MATH_BOXED,
}

_OWN_WORKFLOW = "give your own workflow as FILE.py:CLASS (docs/workflows.md)"


def _environment(name: str) -> str:
    return f"the environment {name} is no part of the platform: {_OWN_WORKFLOW}"


_IMAGES = "models and tasks are text here; images need another platform"
_ADAPTER = f"AgentScope's functions are workflows without an adapter: {_OWN_WORKFLOW}"

#: Workflows that this platform cannot replace, each with the reason and what to do.
REFUSED_WORKFLOWS: Mapping[str, str] = {
    **dict.fromkeys(("alfworld_workflow", "step_wise_alfworld_workflow"), _environment("ALFWorld")),
    **dict.fromkeys(("RAFT_alfworld_workflow", "RAFT_reflect_alfworld_workflow"), _environment("ALFWorld")),
    "sciworld_workflow": _environment("ScienceWorld"),
    "webshop_workflow": _environment("WebShop"),
    "intercode_sql_workflow": _environment("InterCode"),
    "sudoku_workflow": _environment("Sudoku"),
    "email_search_workflow": _environment("of e-mails"),
    "agentscope_v1_react_search_workflow": f"it needs a search service: {_OWN_WORKFLOW}",
    **dict.fromkeys(("simple_mm_workflow", "async_simple_mm_workflow"), _IMAGES),
    **dict.fromkeys(("agentscope_workflow_adapter", "agentscope_workflow_adapter_v1"), _ADAPTER),
    "math_trainable_ruler_workflow": f"section policies trains several models: {_OWN_WORKFLOW}",
    "thinking_budget_workflow": f"model.max_response_tokens limits an answer: {_OWN_WORKFLOW}",
}

REWARDS: Mapping[str, Judge] = {
    "math_reward": _MATH_AND_FORM,
    "math_boxed_reward": "math",
    "math_dapo_reward": "math",
    "math_verify_reward": "math",
    "accuracy_reward": "math",
    "countdown_reward": "countdown",
    "format_reward": [FORM],
}

_GRADER = "it needs another project's graders: set judge: llm with criteria (docs/judges.md)"

#: Rewards that this platform cannot replace, each with the reason and what to do. They are accepted only if
#: ``reward_fn_args.reward_name`` is a key of ``REWARDS``.
REFUSED_REWARDS: Mapping[str, str] = dict.fromkeys(
    (
        "rm_gallery_reward", "openjudge_reward", "trajectory_accuracy_grader_reward",
        "openjudge_trajectory_accuracy_reward", "openjudge_multi_grader_reward",
    ),
    _GRADER,
)  # fmt: skip

#: Algorithms that have another name here: that name, and a line about a difference (None: there is no difference).
ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    "raft": ("rft", "runs with a reward of at least algorithm.filters.reward_threshold (1) are trained on"),
    "grpo_verl": ("grpo", None),
    "reinforceplusplus": ("reinforce++", None),
    "mix_chord": ("mix", "the schedule of mu is algorithm.experts.warmup_steps, decay_steps and final_weight"),
    "jsd": ("gkd", "the divergence to the teacher is computed over the whole vocabulary, in the trainer"),
}

#: Algorithms to whose loss the other system adds a KL term of weight ``KL_COEF``, unless the file says otherwise.
WITH_KL = frozenset(
    {
        "cispo", "gigpo", "gspo", "grpo", "grpo_verl", "mix", "mix_chord", "multi_step_grpo", "opmd", "ppo", "rec",
        "reinforceplusplus", "rloo", "sapo", "topr",
    }
)  # fmt: skip
KL_COEF = 0.001

#: The platform's own losses and advantages. All other functions are the user's own; their arguments keep their names.
LOSSES = frozenset(
    {
        "cispo", "clip_b", "clip_cov", "clip_v", "dpo", "gkd", "gmpo", "gspo", "hinge", "ipo", "kl_cov", "kto", "mix",
        "opmd", "orpo", "ppo", "rec", "reinforce", "sapo", "sft", "simpo", "sppo", "topr",
    }
)  # fmt: skip
ADVANTAGES = frozenset(
    {
        "asymre",
        "gae",
        "gigpo",
        "grpo",
        "on_policy_distill",
        "opmd",
        "reinforce_plus_plus",
        "remax",
        "rloo",
        "step_wise_grpo",
    }
)

_BATCHES_OF_VERL = "rows are packed up to trainer.max_token_len_per_gpu"

#: Arguments of losses by foreign name: their name here; None: no effect, for the reason ``LOSS_NOTE``.
LOSS_ARGUMENTS: Mapping[str, str | None] = {
    "clip_range_low": "clip_low",
    "clip_range_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "enable_phi_function": "phi",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "epsilon_low_prime": "ring_low",
    "epsilon_high_prime": "ring_high",
    **dict.fromkeys(
        (
            "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer",
            "train_batch_size_usual", "train_batch_size_expert", "fallback_to_policy_gradient", "sft_loss_agg_mode",
        ),
        None,
    ),
}  # fmt: skip
LOSS_NOTE = _BATCHES_OF_VERL

#: The same for arguments of advantages; None: no effect, for the reason ``ADVANTAGE_NOTE``.
ADVANTAGE_ARGUMENTS: Mapping[str, str | None] = {
    "epsilon": "eps",
    "std_normalize": "normalize_std",
    "std_cal_level": "std_level",
    "enable_step_norm": "step_norm",
    "opmd_baseline": "baseline",
    "rank_penalty": None,
    "duplicate_experiences": None,
}
#: Advantages of the foreign system that leave out tokens: the loss that does this here, with the advantage ``grpo``.
ENTROPY_CLIPS: Mapping[str, str] = {"clipb": "clip_b", "clipv": "clip_v"}
#: Arguments of these advantages that are arguments of the loss here.
ENTROPY_CLIP_ARGUMENTS: Mapping[str, str] = {"mu": "mu", "max_frac": "max_share"}
ADVANTAGE_NOTE = "the advantage has the definition in docs/algorithms.md"

#: Operators of experiences that are left out, and what replaces each of them.
OPERATORS: Mapping[str, str] = {
    "pass_rate_calculator": "task_selector difficulty_based measures pass rates itself",
    "data_juicer": "Data-Juicer is no part of the platform: a weighted judge or your own operator takes its place",
    "reward_shaping_mapper": "weights of several judges take its place",
}

#: Options of the task selector difficulty_based by foreign name: their name here.
SELECTOR_ARGUMENTS: Mapping[str, str] = {"target_reward": "target"}
SELECTOR_NOTE = "difficulty_based has its own options (docs/data.md)"
