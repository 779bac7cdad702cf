"""Joins each connection to a listening socket of the host with one to an address of the network it runs in.

`python forward.py DESCRIPTOR ADDRESS PORT`, started inside a cluster's network. The listening socket is
inherited as a descriptor, for a socket stays in the network that it was made in.
"""

from __future__ import annotations

import asyncio
import socket
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies up to the end of the stream, and passes the end on."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def main(descriptor: int, address: str, port: int) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(address, port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        except OSError:
            pass  # either end is gone, so the other has to go
        finally:
            writer.close()
            far_writer.close()

    server = await asyncio.start_server(join, sock=socket.socket(fileno=descriptor))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
