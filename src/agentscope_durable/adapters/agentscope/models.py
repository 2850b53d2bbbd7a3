"""Every request to a model, recorded for what it was.

Rule 1: a request is STARTED in a commit before it leaves, and each is one of its own: the retries inside a model, those
of the agent, the fallback model, and calls beside the reply (MC-02, MC-09, MC-12).
Rule 2: nothing about usage is invented. What a provider reported is kept, also of a request that never ended; what it
did not report stays unknown (MC-04, MC-08).
Rule 3: an answer and the end of its request become true in one commit, so the end of a request that was answered is
held here until whoever stores the answer takes it. A failure is told at once, and with it its previews are void.
Rule 4: observing needs the four protected override points of `ChatModelBase`, and only on a proxy of our own. A model
with its own `__call__` is seen from outside only: MODEL_CALL, one request, no retries inferred (MC-07).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Final, Protocol

from agentscope_durable import _failpoints
from agentscope_durable.adapters.agentscope.codec import structured_payload, structured_response, usage_of
from agentscope_durable.adapters.agentscope.context import current_compression
from agentscope_durable.adapters.agentscope.increments import Increment
from agentscope_durable.contracts.commands import Abandon
from agentscope_durable.contracts.errors import Unavailable
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.status import ModelObservation, ModelPurpose, ModelStatus, StepPhase
from agentscope_durable.domain import ids
from agentscope_durable.journal.models import ModelRequestEnded, ModelRequestObserver, ModelRequestStarted
from agentscope_durable.journal.position import AgentExecutionPosition

__all__ = ["ModelCall", "ModelCalls", "ModelInterrupted", "close_stream", "model_name"]

ERROR_CHARS_MAX: Final = 512


class ModelInterrupted(Unavailable):
    """A request was cancelled from inside, by nobody who may end the reply."""

    def __init__(self) -> None:
        super().__init__("a model request was cut off by a cancellation that nobody asked for")


class Recording(Protocol):
    """What recording needs of the execution it belongs to."""

    @property
    def run_id(self) -> str: ...

    @property
    def turn_id(self) -> str: ...

    @property
    def position(self) -> AgentExecutionPosition: ...

    @property
    def attempt(self) -> int: ...

    @property
    def failure(self) -> BaseException | None: ...

    def next_attempt(self) -> int: ...

    def open_step(self, phase: StepPhase) -> list[StepFact]: ...

    @property
    def step_id(self) -> str: ...

    def accept(self, increment: Increment) -> None: ...

    async def record(self, increment: Increment) -> None: ...

    async def flush(self) -> Any: ...

    def position_rows(self) -> Increment: ...

    def monotonic(self) -> float: ...


def model_name(model: Any) -> str:
    return str(getattr(model, "model", "") or type(model).__name__)


def observation_of(model: Any) -> ModelObservation:
    """How closely requests of this model can be seen."""
    from agentscope.model import ChatModelBase

    model = getattr(model, "observed_model", model)
    stock = isinstance(model, ChatModelBase) and type(model).__call__ is ChatModelBase.__call__
    return ModelObservation.PROVIDER_ATTEMPTS if stock else ModelObservation.MODEL_CALL


class ModelRequest:
    """One request of a call."""

    def __init__(self, call: ModelCall, number: int, attempt: int) -> None:
        self._call = call
        self.number = number
        self.attempt = attempt
        self.sent = False
        self.over = False
        self._usage: Usage | None = None
        self._reported: Usage | None = None
        self._began = 0.0

    def fact(self, status: ModelStatus, *, complete: bool = False, error: str = "") -> ModelFact:
        call = self._call
        elapsed = None
        if self.sent and status is not ModelStatus.STARTED:
            elapsed = max(0, round(1000 * (call.recording.monotonic() - self._began)))
        return ModelFact(
            model_call_id=call.id,
            run_id=call.recording.run_id,
            step_id=call.step_id,
            request=self.number,
            status=status,
            model=call.model,
            purpose=call.purpose,
            observation=call.observation,
            message_id=call.message_id,
            attempt=self.attempt if call.message_id else 0,
            usage=self._usage,
            complete=complete and self._usage is not None,
            elapsed_ms=elapsed,
            error=error,
        )

    def leaves(self) -> None:
        """It is sent now."""
        self.sent = True
        self._began = self._call.recording.monotonic()
        if self._call.observer is not None:
            self._call.observer.started(
                ModelRequestStarted(
                    model_call_id=self._call.id,
                    request=self.number,
                    model=self._call.model,
                    purpose=self._call.purpose,
                )
            )
        _failpoints.hit("model.request.before")

    def knows(self, usage: Any) -> None:
        """The provider reported usage before the end."""
        known = usage_of(usage)
        if known is not None:
            self._usage = known

    async def goes_on(self) -> None:
        """More of the answer follows: usage that is known by now is kept even if the end is never seen (MC-10)."""
        if self._usage is not None and self._usage != self._reported:
            self._reported = self._usage
            await self._call.recording.record(Increment(models=[self.fact(ModelStatus.STARTED)]))

    def completed(self, usage: Any) -> None:
        """The answer has come to its end. Told together with the answer (Rule 3)."""
        if self.over:
            return
        self.knows(usage)
        _failpoints.hit("model.request.after")
        self._end(ModelStatus.COMPLETED)
        self._call.ended.append(self.fact(ModelStatus.COMPLETED, complete=True))

    def failed(self, error: BaseException) -> None:
        if self.over:
            return
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        self._void(ModelStatus.FAILED, text.encode("utf-8", "replace").decode())

    def cancelled(self) -> None:
        """Nobody waits for the answer any more."""
        if not self.over:
            self._void(ModelStatus.CANCELLED, "")

    def _void(self, status: ModelStatus, error: str) -> None:
        self._end(status)
        call = self._call
        told = Increment(models=[self.fact(status, error=error)])
        if call.message_id:
            reason = "the request failed" if status is ModelStatus.FAILED else "the request was cancelled"
            told.abandons.append(Abandon(call.message_id, self.attempt, reason))
        call.voids(told)

    def _end(self, status: ModelStatus) -> None:
        self.over = True
        call = self._call
        if call.observer is not None:
            call.observer.ended(
                ModelRequestEnded(
                    model_call_id=call.id,
                    request=self.number,
                    status=status,
                    usage=self._usage,
                    complete=status is ModelStatus.COMPLETED and self._usage is not None,
                    elapsed_ms=max(0, round(1000 * (call.recording.monotonic() - self._began))) if self.sent else 0,
                )
            )

    async def watched(self, stream: Any) -> AsyncIterator[Any]:
        """The provider's stream, unchanged but for call ids it uses twice."""
        calls = _CallIds()
        try:
            async for chunk in stream:
                self.knows(chunk.usage)
                if chunk.is_last:
                    self.completed(chunk.usage)
                elif chunk.content:
                    calls.tell_apart(chunk)
                    await self.goes_on()
                yield chunk
            self.completed(None)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled()
            raise
        except Exception as error:
            self.failed(error)
            raise
        finally:
            await close_stream(stream)


async def close_stream(stream: Any) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        closed = close()
        if inspect.isawaitable(closed):
            _ = await closed


class ModelCall:
    """A call: the reply of one round by one model, or something beside it.

    Attributes:
        ended: how its requests ended that were answered, until the answer is stored.
    """

    def __init__(
        self,
        recording: Recording,
        number: int,
        *,
        purpose: ModelPurpose,
        message_id: str,
        model: str,
        observation: ModelObservation,
        observer: ModelRequestObserver | None,
        voids: Callable[[Increment], None],
    ) -> None:
        self.recording = recording
        self.id = ids.model_call_id(recording.run_id, number)
        self.step_id = recording.step_id
        self.purpose = purpose
        self.message_id = message_id
        self.model = model
        self.observation = observation
        self.observer = observer
        self.voids = voids
        self.ended: list[ModelFact] = []
        self.requests: list[ModelRequest] = []

    def announce(self) -> tuple[ModelRequest, ModelFact]:
        """The next request, and the fact that must be committed before it leaves."""
        attempt = self.recording.next_attempt() if self.message_id else 0
        request = ModelRequest(self, len(self.requests) + 1, attempt)
        self.requests.append(request)
        return request, request.fact(ModelStatus.STARTED)

    async def start(self) -> ModelRequest:
        """A request that may leave: the one announced, or the next one after a commit of its own."""
        last = self.requests[-1] if self.requests else None
        if last is not None and not last.sent and not last.over:
            last.leaves()
            return last
        request, fact = self.announce()
        told = Increment(steps=self.recording.open_step(StepPhase.REASONING), models=[fact])
        self.step_id = self.recording.step_id
        if self.message_id:
            told.attempt = request.attempt
        await self.recording.record(told)
        _ = await self.recording.flush()
        request.leaves()
        return request

    def take_ended(self) -> list[ModelFact]:
        """The ends to commit with the answer."""
        facts, self.ended = self.ended, []
        return facts


class ModelCalls:
    """The calls of one Run."""

    def __init__(self, recording: Recording, observer: ModelRequestObserver | None) -> None:
        self.recording = recording
        self._observer = observer
        self._number = 0
        self._round: list[ModelCall] = []
        self._announced: ModelCall | None = None

    def _call(self, purpose: ModelPurpose, model: str, observation: ModelObservation, *, message_id: str) -> ModelCall:
        self._number += 1
        return ModelCall(
            self.recording,
            self._number,
            purpose=purpose,
            message_id=message_id,
            model=model,
            observation=observation,
            observer=self._observer,
            voids=self.tell,
        )

    # ---- the reply ----

    def announce(self, model: Any, *, known: bool) -> ModelFact:
        """A round begins: its first request, to be committed with the state the model is given.

        Args:
            known: nobody may choose another model before it is asked.
        """
        self._announced = self._call(
            ModelPurpose.REPLY,
            model_name(model) if known else "",
            observation_of(model),
            message_id=ids.message_id(self.recording.turn_id, self.recording.position.reasoning),
        )
        self._round = [self._announced]
        _, fact = self._announced.announce()
        return fact

    def begin(self, model: Any) -> ModelCall:
        """The agent asks a model for the reply: once more for each of its own retries, and for its fallback."""
        call, self._announced = self._announced, None
        if call is None:
            call = self._call(
                ModelPurpose.REPLY,
                model_name(model),
                observation_of(model),
                message_id=ids.message_id(self.recording.turn_id, self.recording.position.reasoning),
            )
            self._round.append(call)
        call.model = model_name(model)
        call.observation = observation_of(model)
        return call

    def answered(self) -> list[ModelFact]:
        """How the requests of this round ended, for the commit of its answer."""
        facts: list[ModelFact] = []
        for call in self._round:
            facts += call.take_ended()
            for request in call.requests:
                if not request.over:
                    # Somebody answered in the model's place, so it was never sent.
                    request.over = True
                    facts.append(request.fact(ModelStatus.CANCELLED))
        self._round, self._announced = [], None
        return facts

    def tell(self, increment: Increment) -> None:
        """Say what became of a request, with whatever is committed next. When nothing can be, the store finds out."""
        if self.recording.failure is None:
            self.recording.accept(increment)

    # ---- beside the reply ----

    def beside(self, purpose: ModelPurpose, model: Any, observation: ModelObservation) -> ModelCall:
        return self._call(purpose, model_name(model), observation, message_id="")

    # ---- proxies ----

    def observed(self, model: Any, call: ModelCall | None = None) -> Any:
        """The model behind a proxy that records. Without a call each use of it is a call beside the reply."""
        inner = getattr(model, "observed_model", model)
        return _observed_class()(inner, self, call)


class _CallIds:
    """Tells calls of one stream apart to which a provider gave the same id: their arguments would be glued together."""

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        self._now: dict[str, str] = {}
        self._named: dict[str, str] = {}

    def tell_apart(self, chunk: Any) -> None:
        for index, block in enumerate(chunk.content):
            if block.type == "tool_call":
                chunk.content[index] = self._told(block)

    def _told(self, block: Any) -> Any:
        given: str = block.id
        now = self._now.get(given, given)
        written = self._written.get(now)
        if written is None:
            self._written[now] = block.input
            return block
        if complete(written):
            if block.name and not block.input:
                self._named[given] = block.name
                return block
            if block.input.lstrip().startswith("{") and (block.name or given in self._named):
                now = f"{given}.{sum(key.startswith(given) for key in self._written) + 1}"
                self._now[given] = now
                self._written[now] = block.input
                name = str(block.name or self._named.pop(given))
                return block.model_copy(update={"id": now, "name": name})
        self._written[now] = written + block.input
        return block if now == given else block.model_copy(update={"id": now})


def complete(text: str) -> bool:
    """Whether what a model has written of a call's arguments is a whole object. It may write what it likes."""
    if not text.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@cache
def _observed_class() -> Any:
    """The proxy class, made when an agent is first built: importing this file does not import AgentScope."""
    from agentscope.model import ChatModelBase, ChatResponse

    class ObservedModel(ChatModelBase):
        """A model whose requests are recorded. Everything else is the model's own."""

        def __init__(self, inner: Any, calls: ModelCalls, call: ModelCall | None) -> None:
            self.observed_model = inner
            self._calls = calls
            self._call = call
            self._attempts = observation_of(inner) is ModelObservation.PROVIDER_ATTEMPTS
            super().__init__(
                credential=getattr(inner, "credential", None),  # pyright: ignore[reportArgumentType]
                model=model_name(inner),
                parameters=getattr(inner, "parameters", None),  # pyright: ignore[reportArgumentType]
                stream=bool(getattr(inner, "stream", True)),
                max_retries=int(getattr(inner, "max_retries", 0)),
                retry_delay=float(getattr(inner, "retry_delay", 0.0)),
                context_size=int(getattr(inner, "context_size", 32768)),
            )

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["observed_model"], name)

        async def __call__(self, messages: Any, tools: Any = None, tool_choice: Any = None, **kwargs: Any) -> Any:
            if self._call is None:
                call = self._calls.beside(ModelPurpose.AUXILIARY, self, observation_of(self.observed_model))
                answer = await self._calls.observed(self, call)(messages, tools, tool_choice, **kwargs)
                return await _beside_answer(self._calls, call, answer)
            if self._attempts:
                return await super().__call__(messages, tools, tool_choice, **kwargs)
            return await self._outer(
                lambda: self.observed_model(messages=messages, tools=tools, tool_choice=tool_choice, **kwargs)
            )

        async def _outer(self, ask: Callable[[], Any]) -> Any:
            assert self._call is not None
            request = await self._call.start()
            try:
                answer = await ask()
            except asyncio.CancelledError:
                request.cancelled()
                raise
            except Exception as error:
                request.failed(error)
                raise
            if inspect.isasyncgen(answer) or hasattr(answer, "__aiter__"):
                return request.watched(answer)
            request.completed(getattr(answer, "usage", None))
            return answer

        async def _call_api(
            self, model_name: str, messages: Any, tools: Any = None, tool_choice: Any = None, **kwargs: Any
        ) -> Any:
            return await self._outer(
                lambda: self.observed_model._call_api(
                    model_name, messages=messages, tools=tools, tool_choice=tool_choice, **kwargs
                )
            )

        def _get_retryable_exceptions(self) -> Any:  # type: ignore[override]
            return self.observed_model._get_retryable_exceptions()

        def _get_disable_thinking_kwargs(self) -> Any:
            return self.observed_model._get_disable_thinking_kwargs()

        def _get_structured_output_fallback_exceptions(self) -> Any:  # type: ignore[override]
            return self.observed_model._get_structured_output_fallback_exceptions()

        async def count_tokens(self, messages: Any, tools: Any) -> int:
            return await self.observed_model.count_tokens(messages, tools)

        async def generate_structured_output(self, messages: Any, structured_model: Any, **kwargs: Any) -> Any:
            """Recorded, and within a compression answered from its receipt if there is one (AS-14)."""
            compression = current_compression()
            recording = self._calls.recording
            key = "" if compression is None else compression.next_key("summary")
            receipt = recording.position.receipts.get(key) if key else None
            if receipt is not None:
                return structured_response(receipt)
            purpose = ModelPurpose.STRUCTURED if compression is None else ModelPurpose.COMPRESSION
            inner = self.observed_model
            own = not isinstance(inner, ChatModelBase) or (
                type(inner).generate_structured_output is not ChatModelBase.generate_structured_output
            )
            attempts = self._attempts and not own
            observation = ModelObservation.PROVIDER_ATTEMPTS if attempts else ModelObservation.MODEL_CALL
            call = self._calls.beside(purpose, self, observation)
            asking = ObservedModel(inner, self._calls, call)
            if attempts:
                response = await ChatModelBase.generate_structured_output(asking, messages, structured_model, **kwargs)
            else:
                response = await asking._outer(
                    lambda: inner.generate_structured_output(
                        messages=messages, structured_model=structured_model, **kwargs
                    )
                )
            told = Increment(models=call.take_ended())
            if key and str(response.finished_reason) != "interrupted":
                recording.position.receipts[key] = structured_payload(response)
                told.merge(recording.position_rows())
            await recording.record(told)
            _ = await recording.flush()
            return response

    async def _beside_answer(calls: ModelCalls, call: ModelCall, answer: Any) -> Any:
        if isinstance(answer, ChatResponse):
            calls.tell(Increment(models=call.take_ended()))
            return answer

        async def stream() -> AsyncIterator[Any]:
            try:
                async for chunk in answer:
                    yield chunk
            finally:
                await close_stream(answer)
                calls.tell(Increment(models=call.take_ended()))

        return stream()

    return ObservedModel
