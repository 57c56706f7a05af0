"""`trainmover run --resilience`: what is made before the job, and taken down after it. Imported with the flag alone."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import replace

from megatron.resilience.agent.environment import control_settings, inherited_environment
from megatron.resilience.cli.job import JobConfig
from megatron.resilience.cli.network import Loopback, Namespaces, Network, NetworkError
from megatron.resilience.cli.resilience_flags import resilience_directory
from megatron.resilience.cli.resilient_job import ResilienceConfig, ResilientJob
from megatron.resilience.cli.tls_flags import tls_files
from megatron.resilience.cli.usage import UsageError
from megatron.resilience.cli.view import open_view
from megatron.resilience.controller.directory import draw_token


def run_resilient(config: JobConfig, options: argparse.Namespace) -> int:
    """Runs the job. Returns its exit code; raises UsageError if it can't start."""
    settings = control_settings(inherited_environment())
    directory = resilience_directory(options.resilience_dir, config.log_dir)
    assert directory is not None, "the job has its log directory by now"
    resilience = ResilienceConfig(
        elastic=options.elastic,
        directory=directory,
        job=settings.job or f"trainmover-{secrets.token_hex(4)}",
        token=settings.token or draw_token(),
        tls=tls_files(options),
    )
    network: Network = Namespaces() if options.isolation == "netns" else Loopback()
    try:
        network.open(config.shape.machines + options.elastic)
        shape = replace(config.shape, master_addr=network.address(0))
        return ResilientJob(replace(config, shape=shape), resilience, network, open_view(sys.stdout)).run()
    except NetworkError as error:
        raise UsageError(str(error)) from error
    finally:
        network.close()
