"""Repairs of megatron-core: one file per patched module; target, why and versions named; each can be reversed."""
