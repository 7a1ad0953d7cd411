"""half_closed: requests for the prompt's log-probabilities whose clients close their side before the engine starts
them. The reply is built from a call that never ran.
"""
import json
import socket

from attack import COMPLETION, Server, report

KEY = "sk-attack"


def request(body):
    data = json.dumps(body).encode()
    return (f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def main():
    with Server("--max-waiting", "500", env={"SHOAL_API_KEY": KEY}) as server:
        for asked in {"echo": True, "logprobs": 1}, {"prompt_logprobs": 2}:
            sockets = []
            for i in range(200):  # more than run in parallel, so that some are cancelled while they wait
                s = socket.create_connection(("127.0.0.1", server.port), 20)
                s.sendall(request({"prompt": f"{i} fish", "max_tokens": 32, **asked}))
                s.shutdown(socket.SHUT_WR)
                sockets.append(s)
            for s in sockets:
                try:
                    s.recv(1 << 16)
                except OSError:
                    pass
                s.close()
            try:
                status, text, _ = server.ask(COMPLETION, {"prompt": "a", "max_tokens": 1}, key=KEY)
            except OSError as e:
                status, text = 0, f"the server has ended: {e}"
            report(f"half-closed requests with {', '.join(asked)} leave the server alive", status == 200 or f"status {status} {text}")


main()
