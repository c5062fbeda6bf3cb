"""A client's side of one connection, as a state machine: no socket, no thread, no lock, no clock.

    conversation = Conversation(now_s)
    call = conversation.prepare(Ping())                   # number and encode the request
    conversation.begin(call, now_s)                       # queue it
    data = conversation.to_send()
    while data is not None:
        data = conversation.sent(send(data))              # or fail(error)
    for number, answer in conversation.read(receive(), now_s):
        conversation.deliver(number, answer)
    call.answer  # past its deadline: conversation.give_up(call)

Answers are matched to calls by number, in any order. A caller may give its call up. If no byte of
the request is sent yet, the request is dropped. Otherwise the answer is late: no caller gets it,
and the conversation queues the return of the ticket, loan, room or recoding that the answer
granted.

An error of the stream ends the conversation: `error` is set, and nothing else is of use.

`Link` runs a conversation for threads, the simulation runs it for tasks. Threads hold one lock
around each call, with two exceptions. `prepare` is safe at any time. `read` is safe for one reader
at a time.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from kvhold.core.errors import ProtocolError
from kvhold.net import messages as m
from kvhold.net.wire import Bytes, Decoder, Splitter, encode, split_number

_UNASKED = 0  # the number of a message that is no answer
_GRANTING = (m.Lookup, m.Claim, m.Reserve, m.Recode)  # answers to other requests grant nothing new

_answer_decoder: Decoder[m.Answer] = Decoder(m.Answer)


class Call:
    """A request under way.

    data:    the bytes that are not sent yet
    grants:  its answer gives the caller something that has to be returned
    keep:    send it even if its caller has given up
    late:    its caller has given up
    begun:   some of its bytes are sent
    answer:  None until it has arrived
    asked_s: when the caller asked
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
    """From the greeting to the end of the connection."""

    def __init__(self, now_s: float) -> None:
        self.error: OSError | ProtocolError | None = None  # the error that ended the conversation
        self.last_heard_s = now_s
        self._numbers = count(_UNASKED + 1)
        self._calls: dict[int, Call] = {}  # begun, and not answered
        self._num_late = 0  # of these
        # in the order of sending; the first one may be sent in part
        self._outbox: deque[Call] = deque()
        self._splitter = Splitter()
        self._news = False

    # Asking.

    def prepare(self, request: m.Message, *, keep: bool = False) -> Call:
        """Number and encode a request. Raises ProtocolError when the node could not accept it."""
        number = next(self._numbers)
        return Call(
            number,
            memoryview(encode(request, number)),
            grants=isinstance(request, _GRANTING),
            keep=keep,
        )

    def begin(self, call: Call, now_s: float) -> None:
        """Queue the request."""
        call.asked_s = now_s
        self._calls[call.number] = call
        self._outbox.append(call)

    def give_up(self, call: Call) -> None:
        """The caller takes no answer any more, even if one has arrived. Idempotent."""
        if call.late:
            return
        call.late = True
        if call.number in self._calls:
            self._num_late += 1
        elif call.answer is not None and call.grants:
            self._return(call.answer, call.asked_s)

    # Sending.

    def to_send(self) -> memoryview | None:
        """The next bytes; None: all is sent. Until `sent`, another call returns the same bytes."""
        while self._outbox:
            call = self._outbox[0]
            if not call.late or call.begun or call.keep:
                return call.data
            self._outbox.popleft()
            if self._calls.pop(call.number, None) is not None:
                self._num_late -= 1
        return None

    def sent(self, nbytes: int) -> memoryview | None:
        """So many of the bytes of `to_send` are on their way.

        Returns the next ones, as `to_send` does.
        """
        call = self._outbox[0]
        if nbytes:
            call.begun = True
            call.data = call.data[nbytes:]
            if not call.data:
                self._outbox.popleft()
        return self.to_send()

    # Receiving.

    def read(self, data: Bytes, now_s: float) -> Iterator[tuple[int, m.Answer]]:
        """The messages that are whole now, for `deliver`.

        Bytes that are no message end the conversation.
        """
        self.last_heard_s = now_s
        try:
            for body in self._splitter.feed(data):
                number, record = split_number(body)
                yield number, _answer_decoder.decode(record)
        except ProtocolError as error:
            self.fail(error)

    def deliver(self, number: int, answer: m.Answer) -> None:
        """Match a message to its call."""
        if number == _UNASKED and isinstance(answer, m.Refused):
            self.fail(ConnectionError(f"the node refused: {answer.reason}"))
            return
        if number == _UNASKED and isinstance(answer, m.News):
            self._news = True
            return
        call = self._calls.pop(number, None)
        if call is None:
            self.fail(ProtocolError("the node said more than it was asked"))
            return
        call.answer = answer
        if call.late:
            self._num_late -= 1
            if call.grants:
                self._return(answer, self.last_heard_s)

    def fail(self, error: OSError | ProtocolError) -> None:
        """The stream is of no more use. The first error stands."""
        if self.error is None:
            self.error = again(error)

    # Its state.

    def take_news(self) -> bool:
        """Whether the node has sent News since the last call of this."""
        news, self._news = self._news, False
        return news

    @property
    def is_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._outbox)

    @property
    def is_owed(self) -> bool:
        """Whether a late answer is still to come."""
        return self._num_late > 0

    @property
    def has_loose_ends(self) -> bool:
        """Whether bytes are to be sent or read, even if no caller waits for them."""
        return self.is_unsent or self.is_owed

    def silent_s(self, now_s: float) -> float:
        """Return seconds since the node's last message while it owes a late answer, else 0."""
        if not self._num_late:
            return 0.0
        oldest_s = min((call.asked_s for call in self._calls.values() if call.late), default=now_s)
        return now_s - max(oldest_s, self.last_heard_s)

    def _return(self, answer: m.Answer, now_s: float) -> None:
        """Queue the return of an answer's grant, if it has one."""
        request = _return_of(answer)
        if request is not None:
            call = self.prepare(request, keep=True)
            self.begin(call, now_s)
            self.give_up(call)


def again(error: OSError | ProtocolError) -> OSError | ProtocolError:
    """The same error without its traceback, whose frames would keep the arena mapped."""
    return type(error)(*error.args)


def _return_of(answer: m.Answer) -> m.Message | None:
    """The request that returns an answer's grant; None if it granted nothing."""
    match answer:
        case m.Found() if answer.ticket:
            return m.Release(answer.ticket)
        case m.Lent():
            return m.Release(answer.loan)
        case m.Granted() if answer.room:
            return m.Abandon(answer.room)
        case m.Recoding():
            return m.Release(answer.number)
        case _:
            return None
