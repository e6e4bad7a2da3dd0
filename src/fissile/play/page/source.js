// Where events come from: the server of `fissile play`, or files that were computed beforehand.

/** Return what asks the server; a lost connection is told, and comes back by itself. */
export function live(hear, tell) {
  let socket = null, number = 0, wanted = null, waited = 500, timer = 0;

  function connect() {
    clearTimeout(timer);
    const address = new URL("run", location.href);
    address.protocol = "ws:";
    address.hash = "";
    socket = new WebSocket(address);
    socket.onopen = () => {
      waited = 500;
      tell("");
      if (wanted) send();
    };
    socket.onmessage = (message) => {
      const event = JSON.parse(message.data);
      if (event.id !== number) return;
      if (event.kind === "done" || event.kind === "error") wanted = null;
      hear(event);
    };
    socket.onclose = () => {
      tell("The server does not answer. Is fissile play still running in its terminal? This page comes back by itself when it is.");
      timer = setTimeout(connect, waited);
      waited = Math.min(2 * waited, 4000);
    };
  }

  function send() {
    number += 1;
    socket.send(JSON.stringify({ id: number, settings: wanted }));
  }

  const again = () => { if (socket.readyState === WebSocket.CLOSED) connect(); };
  addEventListener("online", again);
  document.addEventListener("visibilitychange", again);
  connect();
  return (settings) => {
    wanted = settings;
    if (socket.readyState === WebSocket.OPEN) send();
  };
}

/** Return what plays files with the events of presets, as if they were computed now. */
export function still(hear, tell) {
  let mine = null;
  return async (settings, preset) => {
    const own = (mine = Symbol("playing"));
    try {
      const answer = await fetch(`${preset.name}.json`);
      if (!answer.ok) throw new Error(answer.statusText);
      for (const event of await answer.json()) {
        if (mine !== own) return;
        hear(event);
        await new Promise((done) => setTimeout(done, event.kind === "epochs" ? 40 : 0));
      }
    } catch {
      tell("This preset could not be loaded. Look at your connection, and choose it again.");
    }
  };
}
