// One of the calculator's Pythons: told what to load, then asked. Pyodide's own scripts stand
// before it.

const NOWHERE = "https://pyodide.invalid/"; // nothing is fetched: every file is handed over
let python = null;

async function start({ wasm, library, planner, lock }) {
  self.fetch = async () => new Response(library); // all that the loader still asks for
  WebAssembly.instantiateStreaming = async (_, imports) =>
    ({ module: wasm, instance: await WebAssembly.instantiate(wasm, imports) });
  const loaded = await loadPyodide({ indexURL: NOWHERE, lockFileContents: lock });
  loaded.unpackArchive(planner, "zip", { extractDir: "/planner" });
  loaded.runPython("import sys; sys.path.insert(0, '/planner')");
  python = loaded.pyimport("launcher.tools.site.inside.start");
}

self.onmessage = async ({ data: { id, call, values } }) => {
  try {
    if (call === "start") {
      await start(values);
      self.postMessage({ id, answer: null });
    } else {
      self.postMessage({ id, answer: JSON.parse(python[call](...values)) });
    }
  } catch (error) {
    self.postMessage({ id, error: String(error) });
  }
};
