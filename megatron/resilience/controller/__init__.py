"""The controller of a job: the protocol's core with a gRPC server, a durable journal, a clock and an event log round
it. Imports no torch.
"""
