"""The `megamoe` command: launch a job under torchrun, look at a configuration, the machine or a trace, compile.

This module imports neither torch nor matplotlib, so that `megamoe doctor` works where they are missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megamoe.errors import MegaMoeError

__all__ = ["Parser", "main"]

_DESCRIPTION = """distributed Mixture-of-Experts layers

  megamoe launch CONFIG [key=value ...]    run a job on several ranks
  megamoe config CONFIG [key=value ...]    print the resolved configuration, sizes and valid EP sizes
  megamoe warmup CONFIG [key=value ...]    compile all kernels of a configuration, without a GPU too
  megamoe doctor                           what this machine can run, and what mends the rest
  megamoe trace FILE [FILE ...]            sums of the traces that MEGAMOE_TRACE has written

CONFIG is a YAML file or the name of a preset; key=value overrides it, e.g. model.num_experts=16."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command and those of its sub-commands by name."""
    parser = Parser(prog="megamoe", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, argparse.ArgumentParser] = {}
    subparsers = parser.add_subparsers(dest="command", metavar="{launch,config,warmup,doctor,trace}")

    launch = subparsers.add_parser(
        "launch", help="run a job on several ranks", description="Check the configuration, then start it by torchrun."
    )
    launch.add_argument("config", metavar="CONFIG", help="YAML file or preset")
    launch.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="values that override the file")
    launch.add_argument("--text", metavar="FILE", help="text to run on instead of the shipped one (infer, train)")
    launch.add_argument("--plot", metavar="FILE.png", help="draw the load of the experts (infer, train)")
    launch.add_argument("--dry-run", action="store_true", help="print the torchrun command and start nothing")
    nodes = launch.add_argument_group("several nodes (launch.nnodes > 1): run the same command on each")
    nodes.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="address of one node, the same on all")
    nodes.add_argument("--rdzv-id", default=None, metavar="NAME", help="name of the run, the same on all nodes")
    nodes.add_argument("--node-rank", type=int, default=None, metavar="N", help="rank of this node")
    # Proves that the check of job infer can fail; see megamoe.launch.fault.
    launch.add_argument("--inject-fault", metavar="RANK", type=int, default=None, help=argparse.SUPPRESS)
    launch.epilog = "After `--`: a script of your own and its arguments, run on every rank (job script)."
    commands["launch"] = launch

    config = subparsers.add_parser("config", help="print the resolved configuration")
    config.add_argument("config", metavar="CONFIG", help="YAML file or preset")
    config.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="values that override the file")
    commands["config"] = config

    warmup = subparsers.add_parser(
        "warmup",
        help="compile all kernels of a configuration",
        description="Compile all kernels of a configuration into the cache, on all cores, without a GPU too; print "
        "registers, shared memory, spills and local memory of each. Exit code 1 if one spills or uses local memory.",
    )
    warmup.add_argument("config", metavar="CONFIG", help="YAML file or preset")
    warmup.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="values that override the file")
    warmup.add_argument("--arch", choices=["sm_90a"], default="sm_90a", help="architecture (default %(default)s)")
    commands["warmup"] = warmup

    commands["doctor"] = subparsers.add_parser("doctor", help="what this machine can run")

    trace = subparsers.add_parser(
        "trace",
        help="sums of the traces of MEGAMOE_TRACE",
        description="Print how many tasks of every phase and role a trace has, when they ran, and how long.",
    )
    trace.add_argument("files", nargs="+", metavar="FILE", help="file that MEGAMOE_TRACE has written; one a rank")
    trace.add_argument("--call", type=int, metavar="N", help="of the N-th call alone, from 0 (default: all)")
    trace.add_argument(
        "--plot", metavar="FILE.png", help="draw a call of the first FILE instead: the N-th, or its last one"
    )
    commands["trace"] = trace
    return parser, commands


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """Split the command line into options and the script after `--`.

    Returns:
        the options, and the script with its arguments (None without `--`).
    """
    own, script = list(argv), None
    if "--" in own:
        cut = own.index("--")
        own, script = own[:cut], own[cut + 1 :]
    parser, commands = build_parser()
    if own and own[0] in commands:
        # Options may stand between the overrides, which plain parse_args does not allow.
        options = commands[own[0]].parse_intermixed_args(own[1:])
        options.command = own[0]
    else:
        options = parser.parse_args(own)
        if options.command is None:
            parser.print_help()
            parser.exit(2)
    if script is not None and options.command != "launch":
        parser.error(f"`--` belongs to `megamoe launch`, not to `megamoe {options.command}`")
    return options, script


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `megamoe` command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        the exit code: 0 done, 1 the job or a check failed, 2 the request cannot work, 128 + n ended by signal n.
    """
    options, script = parse(sys.argv[1:] if argv is None else argv)
    try:
        if options.command == "launch":
            from megamoe.launch.launcher import launch

            return launch(options, script)
        if options.command == "config":
            from megamoe.config_report import run_config_command

            return int(run_config_command(options.config, options.overrides) or 0)
        if options.command == "warmup":
            from megamoe.launch.warmup import run_warmup

            return run_warmup(options.config, options.overrides, options.arch)
        if options.command == "trace":
            if options.plot:
                from megamoe.launch.trace_plot import save_trace

                save_trace(Path(options.files[0]), Path(options.plot), options.call)
                return 0
            from megamoe.trace_report import run_trace_command

            return run_trace_command(options.files, options.call)
        from megamoe.launch.doctor import run_doctor

        return run_doctor()
    except MegaMoeError as error:
        print(f"megamoe {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `megamoe config ... | head`
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
