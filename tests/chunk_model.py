"""How the CTAs of the mega-kernel go from chunk to chunk, as a state machine, and a search through all of its states.

The model keeps what impls/mega_moe/chunks.cuh rests on and drops what it does not:
- a rank has CTAs that may start at any time, one word that says which chunk is at work, and a word {chunk, ticket};
- tickets of a chunk: one PUBLISH, a WORK for each rank whose token this rank serves, a COMBINE where it has a token,
  then those behind the last task; a task is done by the CTA that got its ticket;
- PUBLISH writes x, then count and header into every peer's bank (the chunk's parity), one peer after the other; a
  header tells for which chunk it is;
- a CTA needs the schedule for whatever is behind PUBLISH: it waits for all headers, then reads the counts one by one,
  then looks whether its chunk is still at work;
- the CTA with the first ticket behind the last task opens the next chunk when all WORK and COMBINE have ended.

Every step is atomic; memory order is not modelled. Invariants: counts and x are those of the reader's chunk, every task
of every chunk is done once, and whatever happens, all CTAs come to the end. Seeded bugs show that the search is sharp.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Found", "Job", "explore"]


class Found(AssertionError):
    """An invariant does not hold, or nobody can move."""


@dataclass(frozen=True)
class Job:
    """One call.

    Attributes:
        tokens: of each rank and chunk, the rank that serves its one token, or None for no token: `tokens[rank][chunk]`.
        ctas: of each rank.
        bug: "" or what is left out: "look" (behind the counts), "void" (tickets of a chunk that is over are taken for
            valid), "ended" (the next chunk opens without a count of the tasks that have ended).
    """

    tokens: tuple[tuple[int | None, ...], ...]
    ctas: tuple[int, ...]
    bug: str = ""

    @property
    def num_chunks(self) -> int:
        return max(map(len, self.tokens))

    def owner(self, rank: int, chunk: int) -> int | None:
        """Return who serves the token of a rank in a chunk; None: it has none."""
        own = self.tokens[rank]
        return own[chunk] if chunk < len(own) else None

    def served(self, rank: int, chunk: int) -> tuple[int, ...]:
        """Return the ranks whose token a rank serves in a chunk."""
        return tuple(source for source in range(len(self.tokens)) if self.owner(source, chunk) == rank)


class Cta(NamedTuple):
    """`at`: "out", "idle", "between", "opens", "publish", "headers", "counts", "work", "combine", "ended", "gone"."""

    at: str = "out"
    chunk: int = 0
    ticket: int = 0  # of the task in hand
    claimed: int = -1  # chunk of a ticket that is kept, its number in `ticket`
    step: int = 0  # within the task
    known: bool = False  # the schedule of `chunk`


class Rank(NamedTuple):
    """`headers`, `counts`: the chunk for which they were written last, by bank and source; -1: never."""

    word: int
    tickets: tuple[int, int]
    x: int
    headers: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    tags: tuple[int, ...]  # chunks whose slot has come
    ended: int
    done: tuple[tuple[int, str, int], ...]
    ctas: tuple[Cta, ...]


State = tuple[Rank, ...]


def explore(job: Job, limit: int = 2_000_000) -> int:
    """Visit every state; return how many there are.

    Raises:
        Found: an invariant does not hold, or a state has no way on.
    """
    ranks = len(job.tokens)
    none = tuple((-1,) * ranks for _ in range(2))
    first = tuple(Rank(0, (0, 0), -1, none, none, (), 0, (), (Cta(),) * job.ctas[rank]) for rank in range(ranks))
    seen, waiting = {first}, deque([first])
    while waiting:
        state = waiting.popleft()
        following = [
            after for rank in range(ranks) for cta in range(job.ctas[rank]) for after in _steps(job, state, rank, cta)
        ]
        if not following:
            _check_end(job, state)
        for after in following:
            if after not in seen:
                seen.add(after)
                waiting.append(after)
        assert len(seen) < limit, "too many states"
    return len(seen)


def _check_end(job: Job, state: State) -> None:
    for rank, own in enumerate(state):
        if any(cta.at != "gone" for cta in own.ctas):
            raise Found(f"rank {rank} stands still: {own}")
        expected = []
        for chunk in range(job.num_chunks):
            expected.append((chunk, "publish", 0))
            expected += [(chunk, "work", source) for source in job.served(rank, chunk)]
            expected += [(chunk, "combine", 0)] if job.owner(rank, chunk) is not None else []
        if sorted(own.done) != sorted(expected):
            raise Found(f"rank {rank} did {sorted(own.done)}, not {sorted(expected)}")


def _put(items: tuple, index: int, value: object) -> tuple:
    return (*items[:index], value, *items[index + 1 :])


def _steps(job: Job, state: State, rank: int, index: int) -> list[State]:
    """Return the states that one CTA's next step can lead to: one, or none while it waits."""
    own, cta = state[rank], state[rank].ctas[index]
    ranks, bank = len(state), cta.chunk % 2

    def move(new: Cta, **changes: object) -> list[State]:
        return [_put(state, rank, own._replace(ctas=_put(own.ctas, index, new), **changes))]  # type: ignore[arg-type]

    if cta.at == "gone":
        return []
    if cta.at == "out":
        return move(cta._replace(at="idle", chunk=own.word))
    if cta.at == "opens" and (cta.step or job.bug == "ended" or own.ended == _num_ending(job, rank, cta.chunk)):
        if cta.step == 0:  # first the word, then the tickets
            return move(cta._replace(step=1), word=cta.chunk + 1, ended=0)
        return move(cta._replace(at="between", step=0), tickets=(cta.chunk + 1, 0))
    if cta.at in ("between", "opens"):
        following = cta.claimed if cta.claimed >= 0 else own.word
        if cta.at == "opens" or following == cta.chunk:
            return []
        return move(cta._replace(at="idle", chunk=following, known=False))
    if cta.at == "idle":
        if cta.claimed >= 0:
            (chunk, ticket), tickets = (cta.claimed, cta.ticket), own.tickets
        else:
            # tickets far behind the last task are all alike
            (chunk, ticket), tickets = own.tickets, (own.tickets[0], min(own.tickets[1] + 1, ranks + 4))
        if chunk < cta.chunk and job.bug != "void":
            return move(cta, tickets=tickets) if tickets != own.tickets else []
        if chunk > cta.chunk:
            return move(cta._replace(at="between", claimed=chunk, ticket=ticket), tickets=tickets)
        taken = cta._replace(ticket=ticket, claimed=-1, step=0)
        if ticket == 0:
            return move(taken._replace(at="publish"), tickets=tickets)
        return move(taken._replace(at="work" if cta.known else "headers"), tickets=tickets)
    if cta.at == "publish":
        if cta.step == 0:
            return move(cta._replace(step=1), x=cta.chunk)
        if cta.step <= ranks:  # a peer after the other; this rank is one of them
            peer = cta.step - 1
            moved = move(cta._replace(step=cta.step + 1))[0]
            other = moved[peer]
            headers = _put(other.headers, bank, _put(other.headers[bank], rank, cta.chunk))
            counts = _put(other.counts, bank, _put(other.counts[bank], rank, cta.chunk))
            return [_put(moved, peer, other._replace(headers=headers, counts=counts))]
        return move(cta._replace(at="idle", step=0), done=_done(own, cta.chunk, "publish", 0))
    if cta.at == "headers":
        if own.headers[bank][cta.step] == cta.chunk:
            last = cta.step + 1 == ranks
            return move(cta._replace(at="counts" if last else "headers", step=0 if last else cta.step + 1))
        return move(cta._replace(at="between", step=0)) if own.word != cta.chunk else []
    if cta.at == "counts":
        if cta.step < ranks:
            # a count of another chunk is kept in mind as a negative step: it must not be used
            wrong = own.counts[bank][cta.step] != cta.chunk
            return move(cta._replace(step=cta.step + 1, claimed=-2 if wrong else cta.claimed))
        if own.word != cta.chunk and job.bug != "look":
            return move(cta._replace(at="between", step=0, claimed=-1))
        if cta.claimed == -2:
            raise Found(f"rank {rank} builds a schedule of chunk {cta.chunk} from counts of another")
        return move(cta._replace(at="work", step=0, known=True))
    return _task(job, state, rank, index)


def _task(job: Job, state: State, rank: int, index: int) -> list[State]:
    """A ticket behind PUBLISH, by a CTA that knows the schedule."""
    own, cta = state[rank], state[rank].ctas[index]

    def move(new: Cta, **changes: object) -> State:
        return _put(state, rank, own._replace(ctas=_put(own.ctas, index, new), **changes))  # type: ignore[arg-type]

    served, owner = job.served(rank, cta.chunk), job.owner(rank, cta.chunk)
    number = cta.ticket - 1
    if cta.at == "ended":
        return [move(cta._replace(at="idle", step=0), ended=own.ended + 1)]
    if number < len(served):
        source = served[number]
        if state[source].x != cta.chunk:
            raise Found(f"rank {rank} reads x of rank {source} for chunk {cta.chunk}, it is of {state[source].x}")
        moved = move(cta._replace(at="ended"), done=_done(own, cta.chunk, "work", source))
        other = moved[source]
        return [_put(moved, source, other._replace(tags=tuple(sorted((*other.tags, cta.chunk)))))]
    if number == len(served) and owner is not None:
        if cta.chunk not in own.tags:
            return []
        return [move(cta._replace(at="ended"), done=_done(own, cta.chunk, "combine", 0))]
    if cta.chunk + 1 == job.num_chunks:
        return [move(Cta("gone"))]
    first = number == len(served) + (owner is not None)
    return [move(cta._replace(at="opens" if first else "between", step=0))]


def _num_ending(job: Job, rank: int, chunk: int) -> int:
    return len(job.served(rank, chunk)) + (job.owner(rank, chunk) is not None)


def _done(own: Rank, chunk: int, kind: str, number: int) -> tuple[tuple[int, str, int], ...]:
    if (chunk, kind, number) in own.done:
        raise Found(f"{kind} {number} of chunk {chunk} is done twice")
    return tuple(sorted((*own.done, (chunk, kind, number))))
