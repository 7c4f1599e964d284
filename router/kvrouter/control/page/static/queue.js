// Who waits for a turn or for an engine.
import { count, time } from "./format.js";
import { byId, fact, Keyed } from "./dom.js";

export class Queue {
  constructor() {
    this.kept = new Keyed(byId("queue-facts"), fact);
  }

  show({ load, requests }) {
    const facts = [
      ["waiting for a turn", `${count(load.waiting)} of ${count(load.queue_size)}`],
      ["waiting for an engine", count(load.waiting_for_engine)],
      ["longest wait now", time(requests.waiting_s)],
    ];
    this.kept.show(facts, ([name]) => name);
  }
}
