"""A client's side of one connection. No I/O.

If a caller has given up, its unsent call is dropped, or the late answer's grant released. One lock
around each call, except `prepare`, and `read` of one reader.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from kvhold.core.errors import ProtocolError
from kvhold.net import messages as m
from kvhold.net.wire import Bytes, Decoder, Splitter, encode, split_number

_UNASKED = 0
_GRANTING = (m.Lookup, m.LookupSpans, m.Claim, m.Reserve, m.Reencode, m.Copy, m.Retain)

_answer_decoder: Decoder[m.Answer] = Decoder(m.Answer)


class Call:
    """grants: the answer grants something to release
    keep:   send the request even if its caller has given up
    """

    __slots__ = ("answer", "asked_s", "begun", "data", "grants", "keep", "late", "number")

    def __init__(self, number: int, data: memoryview, *, grants: bool, keep: bool) -> None:
        self.number = number
        self.data = data
        self.grants = grants
        self.keep = keep
        self.late = False
        self.begun = False
        self.answer: m.Answer | None = None
        self.asked_s = 0.0


class Conversation:
    def __init__(self, now_s: float) -> None:
        self.error: OSError | ProtocolError | None = None
        self.last_heard_s = now_s
        self._numbers = count(_UNASKED + 1)
        self._calls: dict[int, Call] = {}
        self._num_late = 0
        self._outbox: deque[Call] = deque()
        self._splitter = Splitter()
        self._news = False

    def prepare(self, request: m.Message, *, keep: bool = False) -> Call:
        """Raises ProtocolError."""
        number = next(self._numbers)
        return Call(
            number,
            memoryview(encode(request, number)),
            grants=isinstance(request, _GRANTING),
            keep=keep,
        )

    def begin(self, call: Call, now_s: float) -> None:
        call.asked_s = now_s
        self._calls[call.number] = call
        self._outbox.append(call)

    def give_up(self, call: Call) -> None:
        if call.late:
            return
        call.late = True
        if call.number in self._calls:
            self._num_late += 1
        elif call.answer is not None and call.grants:
            self._return(call.answer, call.asked_s)

    def to_send(self) -> memoryview | None:
        """The same bytes until `sent`."""
        while self._outbox:
            call = self._outbox[0]
            if not call.late or call.begun or call.keep:
                return call.data
            self._outbox.popleft()
            if self._calls.pop(call.number, None) is not None:
                self._num_late -= 1
        return None

    def sent(self, nbytes: int) -> memoryview | None:
        call = self._outbox[0]
        if nbytes:
            call.begun = True
            call.data = call.data[nbytes:]
            if not call.data:
                self._outbox.popleft()
        return self.to_send()

    def read(self, data: Bytes, now_s: float) -> Iterator[tuple[int, m.Answer]]:
        self.last_heard_s = now_s
        try:
            for body in self._splitter.feed(data):
                number, record = split_number(body)
                yield number, _answer_decoder.decode(record)
        except ProtocolError as error:
            self.fail(error)

    def deliver(self, number: int, answer: m.Answer) -> None:
        if number == _UNASKED and isinstance(answer, m.Refused):
            self.fail(ConnectionError(f"the node refused: {answer.reason}"))
            return
        if number == _UNASKED and isinstance(answer, m.News):
            self._news = True
            return
        call = self._calls.pop(number, None)
        if call is None:
            self.fail(ProtocolError("the node sent an answer without a request"))
            return
        call.answer = answer
        if call.late:
            self._num_late -= 1
            if call.grants:
                self._return(answer, self.last_heard_s)

    def fail(self, error: OSError | ProtocolError) -> None:
        """Only the first error is kept."""
        if self.error is None:
            self.error = again(error)

    def take_news(self) -> bool:
        news, self._news = self._news, False
        return news

    @property
    def is_unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def is_owed(self) -> bool:
        return self._num_late > 0

    @property
    def has_loose_ends(self) -> bool:
        return self.is_unsent or self.is_owed

    def silent_s(self, now_s: float) -> float:
        """0: no answer is late."""
        if not self._num_late:
            return 0.0
        oldest_s = min((call.asked_s for call in self._calls.values() if call.late), default=now_s)
        return now_s - max(oldest_s, self.last_heard_s)

    def _return(self, answer: m.Answer, now_s: float) -> None:
        for request in _returns_of(answer):
            call = self.prepare(request, keep=True)
            self.begin(call, now_s)
            self.give_up(call)


def again(error: OSError | ProtocolError) -> OSError | ProtocolError:
    """Without traceback, whose frames would keep the arena mapped."""
    return type(error)(*error.args)


def _returns_of(answer: m.Answer) -> list[m.Message]:
    match answer:
        case m.LookupAnswer() if answer.ticket or answer.announcement:
            return [m.Release(answer.ticket or answer.announcement)]
        case m.SpansAnswer():
            return [m.Release(span.ticket) for span in answer.spans if span.ticket]
        case m.Leased():
            return [m.Release(answer.lease)]
        case m.Granted() if answer.reservation:
            return [m.Abandon(answer.reservation)]
        case m.Retained() if answer.answer.number:
            return [m.Release(answer.answer.number)]
        case m.ReencodeStatus() | m.CopyStatus():
            return [m.Release(answer.number)]
        case _:
            return []
