"""A tiny model learns to use a calculator: word problems, real tool calls, noisy demonstrations, multi-step GRPO."""
