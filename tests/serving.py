"""A server of `examples.serve` in a thread, for its own tests and for those of clients."""

import asyncio
import http.client
import json
import threading

from examples.serve_protocol import Answer, serve


class Running:
    """A server in a thread of its own."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.port = answer, 0
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._is_up.wait(20)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(serve(self.answer, host="127.0.0.1", port=0))
        self.port = listener.sockets[0].getsockname()[1]
        self._is_up.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, str) else json.dumps(body)
        connection.request(method, path, None if body is None else content.encode())
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text
