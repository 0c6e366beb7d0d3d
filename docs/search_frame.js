// Browsers start no worker from a file: there, the search of the site runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget { // the search looks for the first name
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>
        postMessage = (data) => frameElement.dispatchEvent(new CustomEvent("answer", {detail: data}))
        <\/script><script src="${url}"><\/script>`;
      this.frame.addEventListener("answer", ({detail}) => this.dispatchEvent(new MessageEvent("message", {data: detail})));
      this.loaded = new Promise((done) => { this.frame.onload = done; });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      await this.loaded;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
    }
  };
}
