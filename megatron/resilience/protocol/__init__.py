"""The protocol, pure: what controller, agents and ranks say and decide. No torch, I/O, clock, random or threads here.

Shells feed events in and carry actions out; `docs/protocol.md` draws it. Anything may import this package, and it
imports nothing but the standard library's types and msgspec.
"""
