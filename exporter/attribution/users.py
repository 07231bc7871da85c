"""Attribution by unit and by user: what every process has, when nothing better is known."""

import pwd
import threading
import time
from collections.abc import Callable, Mapping

from poolmeter.exporter.attribution.devices import DeviceNames
from poolmeter.exporter.attribution.naming import TenantRule
from poolmeter.exporter.attribution.process import Facts
from poolmeter.exporter.attribution.source import ProcessKey, Quiet
from poolmeter.exporter.attribution.worker import Worker
from poolmeter.model.naming import printable
from poolmeter.model.snapshot import Claim

KEEP_S = 3600.0
MAX_USERS = 10_000


def name_of_uid(uid: int) -> str | None:
    """A user's login name by whatever the system is set up to ask, which may be a directory on the network; None: there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


class UserNames:
    """Login names by user id, asked for by a thread: a directory that hangs holds up nobody but itself."""

    def __init__(self, lookup: Callable[[int], str | None] = name_of_uid, interval_s: float = 60.0) -> None:
        self._lookup, self._interval_s = lookup, interval_s
        self._mutex = threading.Lock()
        self._wanted: set[int] = set()
        self._names: dict[int, tuple[str, float]] = {}  # and when it is to be asked for again
        self.worker: Worker[None] = Worker("users", self._look, interval_s, 10.0)

    def _look(self) -> None:
        with self._mutex:
            now = time.monotonic()
            wanted = [uid for uid in self._wanted if uid not in self._names or now >= self._names[uid][1]]
        for uid in wanted:
            name = self._lookup(uid)
            with self._mutex:
                # A number for a user without a name: containers and jobs of other machines' users have those. A directory that is down
                # says the same, so a name that was found stays, and the question is put again soon.
                known, _ = self._names.get(uid, (f"uid-{uid}", 0.0))
                if len(self._names) >= MAX_USERS:
                    self._names.clear()
                self._names[uid] = (printable(name) if name else known, time.monotonic() + (KEEP_S if name else self._interval_s))

    def version(self) -> object:
        """Changes with every look."""
        return self.worker.result.runs

    def want(self, uid: int | None) -> None:
        """Have the name of a user looked up."""
        if uid is None:
            return
        with self._mutex:
            new = uid not in self._wanted
            if new and len(self._wanted) >= MAX_USERS:
                self._wanted.clear()
            self._wanted.add(uid)
        if new:
            self.worker.wake()

    def name_of(self, uid: int | None) -> str | None:
        """The name; None for one not known (yet)."""
        known = self._names.get(uid) if uid is not None else None
        return known[0] if known else None

    def pending(self, uid: int | None) -> bool:
        """Whether the name has not come yet."""
        return uid is not None and uid not in self._names

    def close(self) -> None:
        """End the thread."""
        self.worker.close()


class Units(Quiet):
    """systemd units. A user's own units may have any name: they are shown, and no tenant follows from them."""

    name = "systemd"

    def __init__(self, rule: TenantRule) -> None:
        self._rule = rule

    def claim(self, facts: Facts) -> Claim | None:
        place = facts.place
        if place is None or place.container or place.pod_uid or place.job or not place.unit:
            return None
        unit = printable(place.unit.encode("utf-8", "surrogateescape"))
        tenant, _ = self._rule.tenant(unit, unit=unit)
        shown = printable(place.user_unit.encode("utf-8", "surrogateescape")) if place.user_unit else unit
        return Claim(source=self.name, tenant=tenant, unit=shown)


class Users(Quiet):
    """Users by the effective user id. Inside a container an id is the container's own business, and says nothing; but for a user's own containers."""

    name = "user"

    def __init__(self, rule: TenantRule, users: UserNames) -> None:
        self._rule, self._users = rule, users

    def version(self) -> object:
        return self._users.version()

    def refresh(self, processes: Mapping[ProcessKey, Facts], devices: DeviceNames) -> None:
        for facts in processes.values():
            self._users.want(_uid(facts))

    def claim(self, facts: Facts) -> Claim | None:
        user = self._users.name_of(_uid(facts))
        if user is None:
            return None
        tenant, by_pattern = self._rule.tenant(user, user=user)
        return Claim(source=self.name, tenant=tenant, firm=by_pattern, user=user)

    def pending(self, facts: Facts) -> bool:
        return self._users.pending(_uid(facts))

    def close(self) -> None:
        self._users.close()


def _uid(facts: Facts) -> int | None:
    place = facts.place
    if place is not None:
        outer = place.outer or place.container
        if outer is not None:
            return outer.rootless_uid
        if place.pod_uid or place.enclosed:
            return None
    return facts.uid
