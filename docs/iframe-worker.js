// A browser starts no worker of a page that is read from the disk, so the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const script = document.createElement("script");
      script.src = url;
      frame.hidden = true;
      frame.srcdoc = script.outerHTML;
      this.inside = new Promise((ready) => {
        frame.addEventListener("load", () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          ready(frame.contentWindow);
        });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
