"""Runs on several nodes: makes the command that each node must run, or the Slurm script that runs them all."""

import re
import shlex
from dataclasses import dataclass

from fcsd.config import ResolvedRecipe
from fcsd.errors import ConfigError
from fcsd.launch import own_code

PORT = 29400
GRACE = 120  # seconds between the signal to save and the time limit of the job
_ENDPOINT = re.compile(r"(?P<host>[\w.-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Node:
    """One node of a run on several nodes.

    Attributes:
        count: the number of nodes.
        rank: the number of this node, from 0. The node whose address is ``host`` has number 0.
        host: the address of node 0.
        port: the port on node 0 at which the nodes meet.
    """

    count: int
    rank: int
    host: str
    port: int

    @property
    def meeting(self) -> tuple[str, int]:
        """The address at which the nodes meet: the host name of node 0, and a port that is free there."""
        return self.host, self.port

    def torchrun(self) -> list[str]:
        """The options with which torchrun starts the processes of this node."""
        where = [f"--master-addr={self.host}", f"--master-port={self.port}"]
        return [f"--nnodes={self.count}", f"--node-rank={self.rank}", *where]


def node_of(count: int, rank: int, rendezvous: str | None) -> Node:
    """The node that ``--nodes``, ``--node-rank`` and ``--rendezvous HOST:PORT`` describe.

    Raises:
        ConfigError: the rendezvous is missing or not ``HOST:PORT``, or the rank is not below the number of nodes.
    """
    if rendezvous is None:
        raise ConfigError("--node-rank needs --rendezvous HOST:PORT", "Give the address of node 0, as on all nodes.")
    match = _ENDPOINT.fullmatch(rendezvous)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(
            f"--rendezvous {rendezvous}: expected HOST:PORT",
            hint="Give the address of node 0 and a free port there, the same on every node.",
        )
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank {rank}: the {count} nodes are numbered 0 to {count - 1}")
    return Node(count, rank, match["host"], int(match["port"]))


def node_commands(arguments: list[str], nodes: int, rendezvous: str | None) -> str:
    """The commands that the nodes must run: for each node a comment with its number, and its command.

    Args:
        arguments: the arguments of the command that the user called, including ``--nodes``.
        rendezvous: ``HOST:PORT`` of node 0; with None the commands contain a placeholder for the host.
    """
    meet = rendezvous or f"HOST_OF_NODE_0:{PORT}"
    run = [*own_code.command(), *arguments, *([] if rendezvous else ["--rendezvous", meet])]
    lines = [f"# node {rank}\n{shlex.join([*run, '--node-rank', str(rank)])}" for rank in range(nodes)]
    return "\n".join(lines)


def slurm_script(resolved: ResolvedRecipe, *, nodes: int, gpus: int, options: list[str]) -> str:
    """A Slurm batch script that runs exactly this recipe or sweep.

    The script contains the whole recipe, with every ``--set`` applied. Slurm sends SIGUSR1 ``GRACE`` seconds before the
    time limit, and SIGTERM when it preempts the job. The run then saves and ends with exit code 143, and the script
    puts its job back into the queue. When the job starts again, the run resumes.

    Args:
        gpus: the number of GPUs on each node.
        options: further options of ``fcsd distill`` for the run.
    """
    name, run = resolved.recipe.name, shlex.quote(resolved.recipe.output_dir)
    if resolved.recipe.sweep is None:
        logs = [f"--output={name}-%j-%t.log", "--open-mode=append"]
        start = f'{shlex.join(srun(nodes, gpus, options, logs=logs))} "$recipe"'
    else:  # The sweep starts a job step for each of its runs.
        several = ["--gpus", str(gpus), "--nodes", str(nodes), *options]
        start = f'{shlex.join([*own_code.command(), "distill", *several])} --sweep "$recipe"'
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=USR1@{GRACE}
# Add what your cluster needs: --partition, --account, --time.
set -u

mkdir -p {run}
recipe={run}/submitted.yaml
cat > "$recipe" <<'END_OF_RECIPE'
{resolved.to_yaml().rstrip()}
END_OF_RECIPE

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export host port

{start}
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def srun(nodes: int, gpus: int, options: list[str], *, logs: list[str]) -> list[str]:
    """The ``srun`` command of a job step with one task for each node; the task starts the processes of its node.

    The caller appends the path of the recipe to the command. The variables ``host`` and ``port`` of the batch script
    must be in the environment. After the first node has ended, the others have ``GRACE`` seconds to save and end.
    """
    run = shlex.join([*own_code.command(), "distill", "--gpus", str(gpus), "--nodes", str(nodes), *options])
    task = f'exec {run} --node-rank "$SLURM_NODEID" --rendezvous "$host:$port" "$0"'
    return ["srun", "--kill-on-bad-exit=0", f"--wait={GRACE}", *logs, "bash", "-c", task]
