"""Users in the simulation: each sends a migration, again if no answer comes, and keeps what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.resilience.protocol.messages import Accepted, Finished, Migrate, ProgressLine, Refused, UserAnswer

if TYPE_CHECKING:
    from tests.sim.job import Job

ASK_AGAIN_MS = 600.0


@dataclass
class Asked:
    """One command and its answers."""

    migrate: Migrate
    ending: Finished | Refused | None = None
    heard: list[UserAnswer] = field(default_factory=list)


class Users:
    """One client for each command."""

    def __init__(self, job: Job) -> None:
        self.job, self.world = job, job.world
        self.asked: dict[int, Asked] = {}

    def migrate(self, *leavers: str, to: tuple[str, ...] = (), command_id: str | None = None) -> Asked:
        client = len(self.asked) + 1
        name = command_id or f"c{client}"
        asked = Asked(migrate=Migrate(command_id=name, leavers=leavers, to=to))
        self.asked[client] = asked
        wanted = f" --to {' --to '.join(to)}" if to else ""
        self.world.say(f"user {client}: migrate --from {' --from '.join(leavers)}{wanted} ({name})")
        self._send(client)
        return asked

    def _send(self, client: int) -> None:
        asked = self.asked[client]
        if asked.ending is None:
            self.job.controller.ask(client, asked.migrate)
            self.world.after(ASK_AGAIN_MS, lambda: self._send(client))

    def hear(self, client: int, answer: UserAnswer) -> None:
        asked = self.asked[client]
        asked.heard.append(answer)
        text = ""
        match answer:
            case Finished(ok=ok, text=text):
                asked.ending = answer
                self.world.say(f"user {client} is told: {'done' if ok else 'failed'}: {text}")
            case Refused(why=why):
                asked.ending = answer
                self.world.say(f"user {client} is told: refused: {why}")
            case Accepted(text=text) | ProgressLine(text=text):
                self.world.say(f"user {client} is told: {text}")

    @property
    def all_answered(self) -> bool:
        return all(asked.ending is not None for asked in self.asked.values())
