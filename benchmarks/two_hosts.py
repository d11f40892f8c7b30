"""What becomes of a run that loses a host? ``python -m benchmarks.two_hosts`` cuts one of two off and joins it again.

Two network namespaces with a cable between them stand for the hosts (which takes root and ``ip``), a torchrun in each,
one rank each, the run's folder shared. The host with torchrun's store and rank 0 keeps running; the cable of the other
is cut at a step and put back some seconds later. Where a torchrun ends before the run does it is started again, as a
scheduler or systemd would. The survivor must notice, go on from the last checkpoint when the other is back, and the
ended run must be an undisturbed one bit for bit. The exit code is 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import above_0, at_least_1
from benchmarks.distillation import ROOT
from benchmarks.faults import SETTINGS, Start, differences, end_all, leftovers, new_folder, newest, processes, reached
from distill.run_folder import STARTS
from fsdp_cp.errors import UserError

ADDRESSES = ("10.203.77.1", "10.203.77.2")
"""Of the host with the store, and of the other. torchrun gives rank 0 to the address that comes first as text."""
PORT = 29411
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=900,read_timeout=600"
SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it a torchrun that is started again does not find rank 0's address (torch 2.13), see docs/cluster.md."""
TIMEOUT = "timeout.step=0.5"
"""Minutes; by the default of 10 nobody would notice sooner."""
AGAIN = 3.0
"""Seconds after which a torchrun that ended is started again."""


def ip(*words: str) -> None:
    """``ip WORDS``.

    Raises:
        UserError: with what it says: no root, or no such thing in this kernel or container.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Two network namespaces with a cable between them, for the length of the context."""

    def __init__(self) -> None:
        self.names = tuple(f"host{number}_{os.getpid()}" for number in range(2))
        self.cables = tuple(f"v{os.getpid()}_{number}" for number in range(2))

    def __enter__(self) -> Hosts:
        if shutil.which("ip") is None:
            raise UserError("there is no `ip` here; install iproute2")
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
            for name, cable, address in zip(self.names, self.cables, ADDRESSES, strict=True):
                ip("link", "set", cable, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", cable, "up")
        except UserError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:  # its end of the cable goes with it
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def cable(self, state: str) -> None:
        """``down`` cuts the second host off, ``up`` puts the cable back."""
        ip("-n", self.names[1], "link", "set", self.cables[1], state)

    def start(self, number: int, run_dir: Path, overrides: Sequence[str], rendezvous: str, log: Path) -> Start:
        """torchrun on one host."""
        is_host = "true" if number == 0 else "false"
        return Start(
            run_dir,
            overrides,
            torchrun=(
                *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", ADDRESSES[number]),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", "two_hosts"),
                *("--rdzv-conf", f"is_host={is_host},{rendezvous}"),
            ),
            log=log,
            before=("ip", "netns", "exec", self.names[number]),
            GLOO_SOCKET_IFNAME=self.cables[number],
            **{SHARED: os.environ.get(SHARED, "1")},
        )


@dataclass(kw_only=True)
class Seen:
    """What happened, in seconds after the cable was cut."""

    cut: float
    """``time.monotonic()`` at the cut."""
    lines: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """One line, here and on the log."""
        line = f"| {time.monotonic() - self.cut:.1f} | {what} |"
        self.lines.append(line)
        print(line, file=sys.stderr, flush=True)


def starts(run_dir: Path) -> list[int]:
    """The step that each start went on from."""
    try:
        return [json.loads(line)["from_step"] for line in (run_dir / STARTS).read_text().splitlines()]
    except OSError:
        return []


def watch(hosts: Hosts, run_dir: Path, args: argparse.Namespace, logs: list[Path]) -> tuple[Seen, list[str]]:
    """Run it with the cut; what was seen, and what should not have been."""
    overrides = [*SETTINGS, TIMEOUT, *args.overrides]
    agents = [hosts.start(number, run_dir, overrides, args.rdzv_conf, logs[number]) for number in range(2)]
    try:
        for agent in agents:
            agent.until(lambda: reached(run_dir) >= args.cut_at)
        seen, faults = Seen(cut=time.monotonic()), []
        hosts.cable("down")
        if args.reboot:  # with the cable cut nobody tells the survivor
            agents[1].process.kill()
            os.kill(agents[1].ranks()[1], signal.SIGKILL)
        before, kept, survivor = starts(run_dir), newest(run_dir), agents[0].ranks().get(0)
        seen.note(f"cut at step {reached(run_dir)}; the newest complete checkpoint is of step {kept}")
        noticed, joined, ended = False, False, {}
        while agents[0].process.poll() != 0 or not joined:
            now = time.monotonic() - seen.cut
            if now > args.limit:
                faults.append(f"not ended after {args.limit:.0f} s")
                break
            if not joined and now >= args.away:
                hosts.cable("up")
                joined = True
                seen.note("joined again")
            if not noticed and survivor not in agents[0].ranks().values():
                noticed = True
                kept = newest(run_dir)
                seen.note(f"rank 0 noticed and has ended; the newest complete checkpoint is of step {kept}")
            if len(starts(run_dir)) > len(before):
                before = starts(run_dir)
                seen.note(f"a start went on from step {before[-1]}")
                if before[-1] != kept:
                    faults.append(f"went on from step {before[-1]}, but there was one of step {kept}")
            for number, agent in enumerate(agents):
                if not agent.process.poll():
                    continue
                if number not in ended:
                    ended[number] = now
                    seen.note(f"torchrun on host {number} ended with {agent.process.returncode}")
                if now - ended[number] > AGAIN and (joined or number == 0):
                    agents[number] = hosts.start(number, run_dir, overrides, args.rdzv_conf, logs[number])
                    del ended[number]
                    seen.note(f"torchrun on host {number} is started again")
            time.sleep(0.2)
        if not noticed:
            faults.append("rank 0 did not notice")
        seen.note(f"the run is at step {reached(run_dir)}")
        time.sleep(5)  # the other torchrun ends a moment later
        return seen, faults + ([f"{len(processes(run_dir))} processes lived on"] if processes(run_dir) else [])
    finally:
        end_all(run_dir)
        for agent in agents:
            agent.process.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--cut-at", type=at_least_1, default=8, metavar="STEP", help="when the cable is cut")
    parser.add_argument("--away", type=above_0, default=60.0, metavar="SECONDS", help="until it is put back")
    parser.add_argument("--reboot", action="store_true", help="the host that is cut off loses its processes, too")
    parser.add_argument("--limit", type=above_0, default=400.0, metavar="SECONDS", help="after the cut, to the end")
    parser.add_argument("--rdzv-conf", default=RENDEZVOUS, help="torchrun's, of both hosts")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of train.py, of both runs")
    parser.add_argument("--out", type=Path, default=Path("runs/two_hosts"), help="new folder: runs, logs, two_hosts.md")
    args = parser.parse_args(argv)
    out = new_folder(args.out)
    truth, run_dir = out / "undisturbed", out / "cut"
    with Hosts() as hosts:
        with Start(truth, [*SETTINGS, TIMEOUT, *args.overrides], log=out / "undisturbed.log") as start:
            if start.process.wait():
                raise RuntimeError(f"the undisturbed run failed; see {out / 'undisturbed.log'}")
        seen, faults = watch(hosts, run_dir, args, [out / f"host_{number}.log" for number in range(2)])
    faults += differences(run_dir, truth)
    faults += [f"left behind: {name}" for name in leftovers(run_dir)]
    verdict = "**" + "; ".join(faults) + "**" if faults else "the same as the undisturbed run, bit for bit"
    text = "\n".join(["| s after the cut | |", "|---|---|", *seen.lines, "", verdict])
    (out / "two_hosts.md").write_text(text + "\n")
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else torchruns and namespaces would outlive this program
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
