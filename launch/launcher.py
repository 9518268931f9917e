"""`megamoe launch`: check everything that can be checked, then run torchrun in this very process.

torchrun runs here and not in a child, so that killing the launcher is killing torchrun's agent: each worker asks the
kernel to die with it (`megamoe.launch.guard`). The printed command of `--dry-run` is equivalent.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megamoe.config import MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.launch import exits

__all__ = ["LaunchPlan", "launch", "plan_launch"]

_SHUTDOWN_S = 10  # from asking the workers to end until killing them
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What torchrun is to be told.

    Attributes:
        torchrun: torchrun's own arguments, up to the worker module.
        worker: arguments of the worker.
        environment: variables for the workers; one that is already set wins.
        job: infer, train or script.
        num_local: ranks on this node.
        config: the checked configuration.
    """

    torchrun: list[str]
    worker: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    job: str
    num_local: int
    config: MoEConfig

    def command(self) -> str:
        """Return the equivalent shell command."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [sys.executable, "-m", "torch.distributed.run", *self.torchrun, *self.worker]
        return " ".join([*variables, shlex.join(words)])


def _resolve_job(options: argparse.Namespace, script: list[str] | None) -> MoEConfig:
    """Read the configuration; a script after `--` stands for `launch.job=script`."""
    overrides = list(options.overrides)
    if script is not None:
        named = [text for text in overrides if text.partition("=")[0].strip() == "launch.job"]
        if named and named[-1].partition("=")[2].strip() != "script":
            raise ConfigError(f"{named[-1]}: a script after `--` runs as launch.job=script; leave one of the two out")
        overrides.append("launch.job=script")
    config = MoEConfig.from_yaml(options.config, overrides)
    if config.launch.job == "script":
        if not script:
            raise ConfigError("launch.job=script: name the script after `--`, e.g. `megamoe launch CONFIG -- run.py`")
        for option in ("text", "plot", "inject_fault"):
            if getattr(options, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')}: belongs to the jobs infer and train, not to a script")
        if script[0] != "-m" and not Path(script[0]).is_file():
            raise ConfigError(f"{script[0]}: no such script")
        if script[0] == "-m" and len(script) < 2:
            raise ConfigError("-m: name a module after it")
    return config


def _check_job(config: MoEConfig) -> None:
    """Refuse what the jobs infer and train cannot feed.

    Raises:
        ConfigError: the configuration expects other input than slices of a text.
    """
    if config.parallel.replicated_input:
        raise ConfigError(
            "parallel.replicated_input=true: the jobs infer and train give each rank tokens of its own; set it to false"
        )
    if config.indexer is not None and config.attention is None:
        raise ConfigError(
            "section 'indexer' has no section 'attention' beside it: the jobs infer and train build attention layers "
            "and need both; add attention, or leave indexer out"
        )
    if config.router.select == "hash" and (config.model.vocab_size or 0) < 256:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: the jobs infer and train route by byte values and need 256"
        )


def _check_files(options: argparse.Namespace) -> None:
    if options.text is not None:
        from megamoe.launch.text import load_text

        load_text(options.text)
    if options.plot is not None:
        from megamoe.launch.plot import check_plot_path

        check_plot_path(options.plot)


def _rendezvous(options: argparse.Namespace, config: MoEConfig) -> list[str]:
    """Return torchrun's arguments for who takes part and where they meet."""
    arguments = [f"--nproc-per-node={config.nproc}"]
    if config.launch.nnodes == 1:
        for option in ("rdzv_endpoint", "rdzv_id", "node_rank"):
            if getattr(options, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')}: is for launch.nnodes > 1, and launch.nnodes is 1")
        # A free port is picked for each launch, so that two at once do not meet. The numeric address spares a look-up
        # of this machine's name, which need not resolve.
        return ["--standalone", "--local-addr=127.0.0.1", *arguments]
    if options.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.nnodes={config.launch.nnodes}: name the meeting point by --rdzv-endpoint HOST:PORT, "
            "the same on every node"
        )
    arguments += [
        f"--nnodes={config.launch.nnodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.rdzv_endpoint}",
        f"--rdzv-id={options.rdzv_id or 'megamoe'}",
    ]
    if options.node_rank is not None:
        arguments.append(f"--node-rank={options.node_rank}")
    return arguments


def _environment(config: MoEConfig) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // config.nproc)
    environment = {"OMP_NUM_THREADS": str(threads)}
    if config.launch.nnodes == 1 and Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # as above: no look-up of this machine's name
    return environment


def plan_launch(options: argparse.Namespace, script: list[str] | None = None) -> LaunchPlan:
    """Check the request and turn it into a plan, without importing torch.

    Args:
        options: what `megamoe launch` parsed.
        script: a script and its arguments, from after `--`.

    Raises:
        MegaMoeError: the request cannot work; the message says why.
    """
    config = _resolve_job(options, script)
    if config.launch.job != "script":
        _check_job(config)
    _check_files(options)
    worker = [str(options.config), *options.overrides]
    if options.text is not None:
        worker += ["--text", options.text]
    if options.plot is not None:
        worker += ["--plot", options.plot]
    if options.inject_fault is not None:
        if config.launch.job != "infer" or not 0 <= options.inject_fault < config.world_size:
            raise ConfigError(f"--inject-fault: takes a rank below {config.world_size}, in job infer only")
        worker += ["--inject-fault", str(options.inject_fault)]
    if script is not None:
        worker += ["--script", *script]
    return LaunchPlan(
        torchrun=[
            *_rendezvous(options, config),
            "--max-restarts=0",
            f"--log-dir={os.devnull}",  # no directory is left behind
            "-m",
            "megamoe.launch.worker",
        ],
        worker=worker,
        environment=_environment(config),
        job=config.launch.job,
        num_local=config.nproc,
        config=config,
    )


@contextmanager
def _config_file(plan: LaunchPlan) -> Iterator[dict[str, str]]:
    """Give a script the resolved configuration (overrides included) as a file named by MEGAMOE_CONFIG."""
    if plan.job != "script":
        yield {}
        return
    import yaml

    with tempfile.TemporaryDirectory(prefix="megamoe-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(plan.config.to_dict(), sort_keys=False))
        yield {"MEGAMOE_CONFIG": str(path)}


def _explain(failures: dict[int, int], job: str) -> tuple[int, str | None]:
    """Find the rank that failed first in cause, not in time.

    Args:
        failures: exit code by rank; -n for one that was ended by signal n. Ranks that torchrun itself ended are in it.
        job: infer, train or script.

    Returns:
        exit code of the launcher, and a sentence where the ranks have not said it themselves.
    """

    def order(rank: int) -> tuple[int, int]:
        code = failures[rank]
        if job != "script" and code in (exits.LOST_PEER,):
            return 2, rank
        return (1 if code == -signal.SIGTERM else 0), rank

    rank = min(failures, key=order)
    code = failures[rank]
    if code < 0:
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
        return exits.FAILED, f"rank {rank} was killed by {name}; the other ranks were stopped"
    if job != "script" and code in exits.SAID:
        return code, None
    return code, f"rank {rank} ended with exit code {code}; the other ranks were stopped"


def _run(plan: LaunchPlan) -> int:
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun
    except ImportError as error:
        raise MegaMoeError(f"PyTorch cannot be imported ({error}); `megamoe doctor` says what to install") from error

    # The agent reports each failure in a page of its own; the sentence below replaces it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    worker = [*plan.worker]
    at = worker.index("--script") if "--script" in worker else len(worker)
    worker[at:at] = ["--launcher-pid", str(os.getpid())]
    try:
        torchrun([*plan.torchrun, *worker])
    except ChildFailedError as error:
        code, sentence = _explain({rank: f.exitcode for rank, f in error.failures.items()}, plan.job)
        if sentence:
            print(f"megamoe launch: {sentence}", file=sys.stderr)
        return code
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        print(f"megamoe launch: {name} received; all {plan.num_local} ranks were stopped", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def launch(options: argparse.Namespace, script: Sequence[str] | None = None) -> int:
    """Run `megamoe launch`.

    Args:
        options: what the command line holds (`megamoe.cli`).
        script: a script and its arguments, from after `--`.

    Returns:
        the exit code of the run: 0, or that of the rank that failed, or 128 + the signal that ended the launcher.
    """
    plan = plan_launch(options, None if script is None else list(script))
    if options.dry_run:
        print(plan.command())
        return 0
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    try:
        with _config_file(plan) as variables:
            os.environ.update(variables)
            return _run(plan)
    except KeyboardInterrupt:
        print("megamoe launch: interrupted before the ranks started", file=sys.stderr)
        return 128 + signal.SIGINT
