"""Row slots of a lane, and the one count that admission is decided by."""

from engine.request import Request, State


class Rows:
    """Which request holds which row slot, and the live requests by state, oldest admission first."""

    def __init__(self, max_bucket: int) -> None:
        self.max_bucket = max_bucket
        self.prefilling: dict[int, Request] = {}
        self.active: dict[int, Request] = {}
        self.draining: dict[int, Request] = {}
        self._expecting: dict[int, Request] = {}
        self._free = list(range(max_bucket - 1, -1, -1))

    def occupied(self) -> int:
        """Requests that hold a row: active + prefilling + draining. Never above `max_bucket`."""
        return len(self.active) + len(self.prefilling) + len(self.draining)

    def free(self) -> int:
        """Rows that nobody holds."""
        return self.max_bucket - self.occupied()

    def has_room(self) -> bool:
        """True if one more request may be admitted."""
        return self.occupied() < self.max_bucket

    def expected_growth(self, page_size: int) -> int:
        """Pages that the requests in rows have yet to take until they are as long as their clients expect. Those whose
        lifetime is reserved have them already.
        """
        return sum(
            max(0, request.expected_pages(page_size) - len(request.pages))
            for request in self._expecting.values()
            if not request.protected
        )

    def check(self) -> None:
        """Raise if invariant 1 is broken; called before every launch, on every route."""
        if self.occupied() > self.max_bucket:
            raise RuntimeError(
                f"{self.occupied()} requests hold rows ({len(self.active)} active, {len(self.prefilling)} prefilling, "
                f"{len(self.draining)} draining), but max_bucket is {self.max_bucket}"
            )

    def enter(self, request: Request) -> None:
        """Give `request` a row slot and make it prefilling."""
        if not self.has_room():
            raise RuntimeError(f"all {self.max_bucket} rows are taken")
        request.row = self._free.pop()
        request.state = State.PREFILLING
        self.prefilling[request.key] = request
        if request.expected_tokens:
            self._expecting[request.key] = request

    def activate(self, request: Request) -> None:
        """Prefilling becomes active: the step that ends the prompt has been planned."""
        del self.prefilling[request.key]
        request.state = State.ACTIVE
        self.active[request.key] = request

    def drain(self, request: Request) -> None:
        """No further step will be planned for `request`; it keeps its row until the launched ones have resolved."""
        if request.state is State.PREFILLING:
            del self.prefilling[request.key]
        else:
            del self.active[request.key]
        self._expecting.pop(request.key, None)
        request.state = State.DRAINING
        self.draining[request.key] = request

    def leave(self, request: Request) -> None:
        """Free the row of a drained request."""
        del self.draining[request.key]
        self._free.append(request.row)
        request.row = -1
