"""Sends gradients while others are still computed, where variables tell that theirs are there."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvd_keras.gradients import buckets
from hvd_keras.runtime import settings


class Watched(Protocol):
    """A variable that tells when its gradient is computed."""

    nbytes: int
    #: Has a function called with each new gradient; returns an object with ``remove()``.
    watch: Callable[[Callable[[Any], None]], Any]

    def gradient(self) -> Any:
        """Return the gradient."""

    def zeros(self) -> Any:
        """Return a gradient of zeros."""

    def state(self, gradient: Any) -> Any:
        """Return what changes if a gradient does."""


class Ahead:
    """Sends each bucket of gradients once it is computed.

    Every bucket that is sent on one rank is sent once on all, at the latest in ``results``.

    Args:
        variables: in the order of the optimizer, the same on all ranks.
        send: a method that begins to exchange a bucket's gradients, given by numbers and values.
    """

    def __init__(
        self, variables: Sequence[Watched], send: Callable[[list[int], list[Any]], Any]
    ) -> None:
        self._variables = variables
        # Hooks live as long as variables, which may get another optimizer.
        self._sender = weakref.WeakMethod(send)
        order = list(reversed(range(len(variables))))  # backpropagation makes the last first
        sizes = [variables[i].nbytes for i in order]
        filled = buckets.fill(sizes, settings.read().bucket_bytes)
        self._buckets = [[order[k] for k in bucket] for bucket in filled]
        self.sent: dict[int, Any] = {}  # requests, by bucket
        self._is_stale = False  # a gradient has changed since it was sent
        self._given: dict[int, Any] = {}  # the states of what was sent, by variable
        self._awaited = list(map(set, self._buckets))
        self._hooks = [
            variables[i].watch(functools.partial(self._see, number, i))
            for number, bucket in enumerate(self._buckets)
            for i in bucket
        ]

    def _see(self, number: int, i: int, _: Any) -> None:
        if self._sender() is None:
            self.remove()
            return
        self._is_stale |= number in self.sent  # computed again before the update
        self._awaited[number].discard(i)
        if not self._is_stale and not self._awaited[number]:
            bucket = self._buckets[number]
            mine = [self._variables[k].gradient() for k in bucket]
            self._given |= {k: self._state(k, g) for k, g in zip(bucket, mine, strict=True)}
            self.sent[number] = self._send(bucket, mine)

    def _send(self, bucket: list[int], gradients: list[Any]) -> Any:
        send = self._sender()
        assert send is not None  # an optimizer calls, or it was asked for before
        return send(bucket, gradients)

    def _state(self, i: int, gradient: Any) -> Any:
        return self._variables[i].state(gradient)

    def differs(self, gradients: Sequence[Any]) -> bool:
        """Whether an update gets other gradients than were sent."""
        return self._is_stale or any(
            gradients[i] is None or self._state(i, gradients[i]) != state
            for i, state in self._given.items()
        )

    def results(self, gradients: list[Any], exist: Any) -> dict[int, Any]:
        """Return the results by variable, of the buckets whose gradients all ``exist`` on a rank.

        Args:
            gradients: zeros where this rank has none, but another.
            exist: [variables], an array of bool.
        """
        whole = [n for n, bucket in enumerate(self._buckets) if exist[bucket].all()]
        for n in whole:
            if n not in self.sent:
                bucket = self._buckets[n]
                self.sent[n] = self._send(bucket, [gradients[i] for i in bucket])
        found = {
            i: reduced
            for n in whole
            for i, reduced in zip(self._buckets[n], self.sent.pop(n).results(), strict=True)
        }
        self._is_stale, self._given, self._awaited = False, {}, list(map(set, self._buckets))
        return found

    def remove(self) -> None:
        """Send nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def drain(self) -> None:
        """The same before an update of other variables; all ranks receive what some have sent."""
        self.remove()
        for n, bucket in enumerate(self._buckets):
            zeros = [self._variables[i].zeros() for i in bucket]
            request = self.sent.pop(n, None) or self._send(bucket, zeros)
            request.results()
