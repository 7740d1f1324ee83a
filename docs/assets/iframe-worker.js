// Browsers start no Worker from file://. Where the site is read from the file system, an iframe runs
// the search instead: the same script, with messages passed as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.frame = frame
      this.scope = frame.contentWindow
      this.scope.importScripts = (...urls) => urls.reduce(
        (before, each) => before.then(() => this.load(each)), Promise.resolve()
      )
      this.scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        script.src = new URL(url, location.href).href
        script.onload = resolve
        script.onerror = reject
        this.scope.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
