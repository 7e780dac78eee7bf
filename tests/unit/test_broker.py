"""The broker of events of a local stack."""

import re

import pytest
import zmq

from worker.broker import EventBroker


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_events_of_publishers_that_connect_arrive_in_order_and_none_is_lost(context):
    broker = EventBroker("127.0.0.1")
    match = re.fullmatch(r"xsub=(tcp://127\.0\.0\.1:\d+) , xpub=(tcp://127\.0\.0\.1:\d+)", broker.url)
    assert match
    subscribers = [context.socket(zmq.SUB)]
    for subscriber in subscribers:
        subscriber.set_hwm(0)
        subscriber.connect(match[2])
        subscriber.subscribe(b"kv")
    publisher = context.socket(zmq.XPUB)  # which hears when a subscription has arrived
    publisher.set_hwm(0)
    publisher.connect(match[1])
    assert publisher.poll(10_000)
    for number in range(3000):
        publisher.send_multipart([b"kv", str(number).encode()])
    for subscriber in subscribers:
        for expected in range(3000):
            assert subscriber.poll(10_000)
            assert subscriber.recv_multipart() == [b"kv", str(expected).encode()]
    broker.close()


def test_a_broker_ends_while_clients_are_connected(context):
    broker = EventBroker("127.0.0.1")
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(broker.url.partition("xpub=")[2])
    subscriber.subscribe(b"")
    broker.close()
    assert not broker._thread.is_alive()
