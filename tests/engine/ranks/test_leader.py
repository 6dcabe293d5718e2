from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Client, Listener

from start_llm.engine.ranks.channel import Channel
from start_llm.engine.ranks.leader import LeaderGroup, RankHost

KEY = b"k" * 32


def test_a_strangers_connection_does_not_end_the_wait_for_ranks() -> None:
    group = LeaderGroup([RankHost("here", "127.0.0.1"), RankHost("there", "127.0.0.1")], 60, print)
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener, socket.create_connection(listener.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no length of a message looks like this

        def connect() -> None:
            Channel(Client(listener.address, authkey=KEY)).send([{"rank": 1}])

        threading.Thread(target=connect, daemon=True).start()
        ((channel, hello),) = group._accept(listener)
    assert hello == {"rank": 1}
    channel.close()
