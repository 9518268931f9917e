"""The protocol of one call as a state machine, small enough to read, and a search through all of its states.

The model keeps what the correctness of the protocol rests on and drops what it does not:
- ranks run `calls` calls; each call has generation 1, 2, ... on each rank;
- PUBLISH writes x, then the counts into every peer's bank; a flag is the generation it was written for;
- a rank waits for every peer's flag of its own generation before anything else (a call ends only after that);
- the owner PULLs the row of a source that has tokens, multiplies it (ring of `ring` units: L1 fills, L2 empties), L2
  writes the SLOT in the source's memory, then the TAG;
- COMBINE of the source waits for the tag of its generation and reads the slot;
- a rank may ABORT at any wait (its peer is late): it leaves, and every other rank leaves when it sees that.

Memory order is not modelled (ThreadSanitizer is for that): each step is atomic. The invariants are checked at every
read: counts, x and slots must be those of the reader's generation. Seeded bugs (`Bugs`) show that they are sharp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Bugs", "Found", "Result", "explore"]


@dataclass(frozen=True)
class Bugs:
    """Deviations from the protocol that the search must notice."""

    single_banked_counts: bool = False
    tag_before_slot: bool = False
    generation_reused: bool = False
    ring_not_waited_for: bool = False


class Found(AssertionError):
    """An invariant does not hold; the message says which, where, and the steps that lead there."""


@dataclass(frozen=True)
class Result:
    """What a search saw.

    Attributes:
        states: distinct states.
        complete: final states in which every rank ended its last call.
        aborted: final states in which the ranks left on an abort.
    """

    states: int
    complete: int
    aborted: int


class Rank(NamedTuple):
    """One rank. `pc` names the step it takes next; rows are counted per source."""

    call: int  # 0-based; `calls` when done
    pc: str  # publish, counts, work, done, aborted
    published: int  # peers told so far
    seen: int  # peers whose counts were read so far
    pulled: tuple[int, ...]  # sources pulled
    filled: tuple[int, ...]  # sources through L1
    slotted: tuple[int, ...]  # sources whose slot was written
    tagged: tuple[int, ...]  # sources whose tag was written
    combined: tuple[int, ...]  # owners whose slot was read


class Memory(NamedTuple):
    """What one rank's workspace holds: the generation that each word was last written for."""

    flags: tuple[tuple[int, ...], ...]  # [bank][source]: the published flag
    counts: tuple[tuple[int, ...], ...]  # [bank][source]: the call whose counts lie there
    x: int  # the call whose rows lie there
    ring: tuple[int, ...]  # [unit] source + 1 whose row lies there, 0 = none
    slots: tuple[int, ...]  # [owner]: the call of the slot
    tags: tuple[int, ...]  # [owner]: the generation of the tag


State = tuple[tuple[Rank, ...], tuple[Memory, ...]]


def _put(row: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return row[:index] + (value,) + row[index + 1 :]


def _put2(table: tuple[tuple[int, ...], ...], a: int, b: int, value: int) -> tuple[tuple[int, ...], ...]:
    return table[:a] + (_put(table[a], b, value),) + table[a + 1 :]


class Model:
    """The transitions for given tokens.

    Args:
        tokens: `tokens[call][source]`: whether a source has a row in that call; each row goes to every rank.
        bugs: deviations.
        ring: units of an owner's ring.
        with_abort: whether a waiting rank may give up.
    """

    def __init__(self, tokens: list[tuple[int, ...]], bugs: Bugs, ring: int, with_abort: bool) -> None:
        self.tokens, self.bugs, self.ring, self.with_abort = tokens, bugs, ring, with_abort
        self.num_ranks = len(tokens[0])

    def generation(self, call: int) -> int:
        return 1 if self.bugs.generation_reused else call + 1

    def bank(self, call: int) -> int:
        return 0 if self.bugs.single_banked_counts else call % 2

    def fresh(self, call: int) -> Rank:
        pc = "publish" if call < len(self.tokens) else "done"
        return Rank(call, pc, 0, 0, (), (), (), (), ())

    def initial(self) -> State:
        n = self.num_ranks
        zeros = (0,) * n
        memory = Memory((zeros, zeros), (zeros, zeros), 0, (0,) * self.ring, zeros, zeros)
        return (self.fresh(0),) * n, (memory,) * n

    def steps(self, state: State) -> list[tuple[str, State]]:
        """Return every step that some rank can take: (what, the next state). Raises `Found`."""
        result = []
        for index, rank in enumerate(state[0]):
            result += [(f"rank {index} call {rank.call}: {what}", after) for what, after in self._steps(state, index)]
        return result

    def _steps(self, state: State, me: int) -> list[tuple[str, State]]:
        ranks, memories = state
        rank = ranks[me]
        if rank.pc in ("done", "aborted"):
            return []
        steps: list[tuple[str, State]] = []

        def go(what: str, new: Rank, where: int | None = None, memory: Memory | None = None) -> None:
            new_memories = memories if where is None else memories[:where] + (memory,) + memories[where + 1 :]
            steps.append((what, (ranks[:me] + (new,) + ranks[me + 1 :], new_memories)))  # type: ignore[arg-type]

        call, generation, bank = rank.call, self.generation(rank.call), self.bank(rank.call)
        if rank.pc == "publish":
            # x first, then each peer's bank and its flag
            if rank.published == 0 and memories[me].x != call + 1:
                go("writes x", rank, me, memories[me]._replace(x=call + 1))
                return steps
            peer = rank.published
            told = memories[peer]
            told = told._replace(
                flags=_put2(told.flags, bank, me, generation), counts=_put2(told.counts, bank, me, call + 1)
            )
            last = peer + 1 == self.num_ranks
            go(
                f"publishes to {peer}",
                rank._replace(published=peer + 1, pc="counts" if last else "publish"),
                peer,
                told,
            )
            return steps
        waiting = False
        if rank.pc == "counts":
            source = rank.seen
            if memories[me].flags[bank][source] == generation:
                if memories[me].counts[bank][source] != call + 1:
                    raise Found(f"rank {me} read counts of {source} that belong to another call")
                last = source + 1 == self.num_ranks
                go(f"reads counts of {source}", rank._replace(seen=source + 1, pc="work" if last else "counts"))
            else:
                waiting = True
        else:
            self._work(state, me, go)
            waiting = self._waits_for_tag(state, me)
            if self._finished(rank, me):
                go("ends", self.fresh(call + 1))
        # a rank leaves when it gives up, or when it sees at a wait that another one did
        if waiting and self.with_abort:
            go("leaves", rank._replace(pc="aborted"))
        return steps

    def _sources(self, call: int) -> list[int]:
        return [source for source in range(self.num_ranks) if self.tokens[call][source]]

    def _finished(self, rank: Rank, me: int) -> bool:
        own = self.num_ranks if self.tokens[rank.call][me] else 0
        sources = len(self._sources(rank.call))
        return len(rank.tagged) == len(rank.slotted) == sources and len(rank.combined) == own

    def _waits_for_tag(self, state: State, me: int) -> bool:
        rank, memory = state[0][me], state[1][me]
        if not self.tokens[rank.call][me]:
            return False
        owner = len(rank.combined)
        return owner < self.num_ranks and memory.tags[owner] != self.generation(rank.call)

    def _work(self, state: State, me: int, go: Callable[..., None]) -> None:
        rank, memories = state[0][me], state[1]
        memory, call, generation = memories[me], rank.call, self.generation(rank.call)
        sources = self._sources(call)
        # pull: the unit's slot of the ring must be free, that is, its row is through L2
        if len(rank.pulled) < len(sources):
            unit = len(rank.pulled)
            free = unit < self.ring or len(rank.slotted) > unit - self.ring or self.bugs.ring_not_waited_for
            if free:
                source = sources[unit]
                if memories[source].x != call + 1:
                    raise Found(f"rank {me} pulled x of {source} that belongs to another call")
                ring = _put(memory.ring, unit % self.ring, source + 1)
                go(f"pulls {source}", rank._replace(pulled=(*rank.pulled, source)), me, memory._replace(ring=ring))
        if len(rank.filled) < len(rank.pulled):
            go("multiplies", rank._replace(filled=(*rank.filled, sources[len(rank.filled)])))
        # L2: slot, then tag (the other way round where seeded)
        first, second = ("tagged", "slotted") if self.bugs.tag_before_slot else ("slotted", "tagged")
        for name, ready in ((first, rank.filled), (second, getattr(rank, first))):
            done = getattr(rank, name)
            if len(done) >= len(ready):
                continue
            unit = len(done)
            source = sources[unit]
            target = memories[source]
            if name == "slotted":
                if memory.ring[unit % self.ring] != source + 1:
                    raise Found(f"rank {me} multiplied a row of its ring that had been overwritten")
                target = target._replace(slots=_put(target.slots, me, call + 1))
            else:
                target = target._replace(tags=_put(target.tags, me, generation))
            go(f"{name} {source}", rank._replace(**{name: (*done, source)}), source, target)
        # combine, in k order
        if self.tokens[call][me] and len(rank.combined) < self.num_ranks:
            owner = len(rank.combined)
            if memory.tags[owner] == generation:
                if memory.slots[owner] != call + 1:
                    raise Found(f"rank {me} summed a slot of {owner} that belongs to another call")
                go(f"sums slot of {owner}", rank._replace(combined=(*rank.combined, owner)))


def explore(
    tokens: list[tuple[int, ...]], *, bugs: Bugs | None = None, ring: int = 1, with_abort: bool = False
) -> Result:
    """Visit every reachable state.

    Args:
        tokens: `tokens[call][source]`, 1 where a source has a row in that call.
        bugs: deviations to seed.
        ring: units of an owner's ring.
        with_abort: let waiting ranks give up.

    Raises:
        Found: an invariant does not hold, or ranks wait for each other without end.
    """
    model = Model(tokens, bugs or Bugs(), ring, with_abort)
    start = model.initial()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    complete = aborted = 0
    while queue:
        state = queue.popleft()
        try:
            steps = model.steps(state)
            if not steps:
                kinds = {rank.pc for rank in state[0]}
                complete += kinds == {"done"}
                aborted += "aborted" in kinds
                if kinds - {"done", "aborted"}:
                    raise Found(f"ranks wait without end: {[rank.pc for rank in state[0]]}")
        except Found as error:
            raise Found(f"{error}; steps: {' | '.join(_trail(parents, state))}") from None
        for what, after in steps:
            if after not in parents:
                parents[after] = (state, what)
                queue.append(after)
    return Result(len(parents), complete, aborted)


def _trail(parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    steps = []
    while (parent := parents[state]) is not None:
        state, what = parent
        steps.append(what)
    return steps[::-1]
