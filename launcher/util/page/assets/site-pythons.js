// The planner in workers: Pythons that are started once and asked one question at a time each.

const MOST_PYTHONS = 4;
const text = (id) => document.getElementById(id).textContent;

function bytes(id) {
  return Uint8Array.from(atob(text(id)), (letter) => letter.charCodeAt(0));
}

function unpacked(id) {
  const stream = new Blob([bytes(id)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream);
}

class Python {
  #worker;
  #waiting = new Map();
  #next = 0;
  busy = false;

  constructor(address) {
    this.#worker = new Worker(address);
    this.#worker.onmessage = ({ data: { id, answer, error } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      error === undefined ? resolve(answer) : reject(new Error(error));
    };
  }

  ask(call, values) {
    const id = this.#next++;
    this.#worker.postMessage({ id, call, values });
    return new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
  }
}

// Whoever is asked first starts first; further ones come while it works already.
class Pythons {
  #idle = [];
  #queue = [];

  // `stage(n)` is told as each part begins, and once more when a first answer can be had.
  async start(stage) {
    stage(0);
    const address = URL.createObjectURL(new Blob([await unpacked("worker").text()]));
    stage(1);
    const wasm = await WebAssembly.compile(await (await unpacked("wasm")).arrayBuffer());
    const parts = { wasm, library: bytes("library"), planner: bytes("planner"), lock: text("lock") };
    const cores = navigator.hardwareConcurrency ?? 2;
    const count = PHONE.matches ? 1 : Math.max(1, Math.min(MOST_PYTHONS, cores - 1));
    stage(2);
    await this.#add(address, parts);
    stage(3);
    for (let more = 1; more < count; more++) this.#add(address, parts);
  }

  async #add(address, parts) {
    const python = new Python(address);
    await python.ask("start", parts);
    this.#idle.push(python);
    this.#work();
  }

  // The answer to a question that nobody has withdrawn: `wanted()` is asked when its turn comes.
  ask(call, values, wanted = () => true) {
    return new Promise((resolve, reject) => {
      this.#queue.push({ call, values, wanted, resolve, reject });
      this.#work();
    });
  }

  #work() {
    while (this.#idle.length > 0 && this.#queue.length > 0) {
      const { call, values, wanted, resolve, reject } = this.#queue.shift();
      if (!wanted()) {
        resolve(null);
        continue;
      }
      const python = this.#idle.shift();
      python.ask(call, values).then(resolve, reject).finally(() => {
        this.#idle.push(python);
        this.#work();
      });
    }
  }
}
