"""The trainer: a thin loop over megatron-core with Megatron-LM's flags, defaults and log line."""
