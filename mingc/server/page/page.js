// The page at `/`: chats over HTTP, and live conversations over /v1/realtime. One conversation goes through both.

const RATE = 24000; // Hz, of all sound that the page sends and gets
const MAX_UNSENT = 4 << 20; // bytes that may wait in a live conversation
const MAX_PART = 10 << 20; // bytes of a picture or clip in a live conversation
const MAX_ROUNDS = 5; // of tool calls in one answer
const MAX_OPENING = 3000; // milliseconds that a browser may take to begin with sound
const NO_SOUND = "This browser plays no sound: is there a device for it?";
const NAME = "mingc";
const STAGES = {
    preprocessing: "Thread takes it", prepared: "Media decoded", encoded: "Media encoded", prefill: "Prefill begins",
    first_token: "First token", first_segment: "First segment", first_audio: "First sound",
    condition: "Prompt of the picture read", first_step: "First step", first_image: "First picture",
};
const PHASES = {
    ready: "Ready", recording: "Recording", connecting: "Connecting", listening: "Listening", hearing: "You are speaking",
    thinking: "Thinking", speaking: "Speaking",
};
const GET_TIME = {
    name: "get_time", description: "Date, time and time zone of the user now.",
    parameters: { type: "object", properties: {} },
};

const ui = Object.fromEntries([...document.querySelectorAll("[id]")].map((each) => [each.id, each]));
const server = { model: "", inputs: ["text"], routes: [], hasSpeech: false };
let conversation = []; // of Turn
let attachments = []; // parts of the next message: {kind, name, data (base64), type, preview (URL)}
let answer = null; // the AbortController of the chat that is being answered
let recording = null; // {microphone, blocks}
let live = null; // the Live session

// ---- Small things ----------------------------------------------------------------------------------------------

function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
}

function say(text, isProblem = false) {
    ui.status.className = isProblem ? "problem" : "";
    ui.status.textContent = text;
}

function setPhase(phase) {
    ui.phase.dataset.phase = phase;
    ui.phase.textContent = PHASES[phase];
    ui.level.hidden = !(recording || live?.isOpen);
    ui.mute.hidden = !live?.isOpen;
    const hasFocus = document.activeElement === ui.stop;
    ui.stop.hidden = !(answer || recording || speaker.isPlaying || live?.response || phase === "connecting");
    if (hasFocus && ui.stop.hidden) ui.text.focus();
}

const milliseconds = (value) => (value === undefined ? "–" : `${Math.round(value)} ms`);
const scrollToEnd = () => window.scrollTo(0, document.documentElement.scrollHeight);
const isAtEnd = () => window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 120;

function base64(bytes) {
    let text = "";
    for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
    return btoa(text);
}

/** Decodes base64 of 16-bit samples that comes in parts; a part may end within a sample. */
class Pcm {
    rest = new Uint8Array(0);

    decode(text) {
        const data = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
        const bytes = new Uint8Array(this.rest.length + data.length);
        bytes.set(this.rest);
        bytes.set(data, this.rest.length);
        const count = bytes.length >> 1;
        this.rest = bytes.slice(2 * count);
        return Float32Array.from(new Int16Array(bytes.buffer, 0, count), (each) => each / 32768);
    }
}

/** A WAV file of blocks of Int16 samples. */
function wav(blocks) {
    const size = 2 * blocks.reduce((sum, each) => sum + each.length, 0);
    const head = new DataView(new ArrayBuffer(44));
    const text = (at, word) => [...word].forEach((each, i) => head.setUint8(at + i, each.charCodeAt(0)));
    text(0, "RIFF");
    head.setUint32(4, 36 + size, true);
    text(8, "WAVEfmt ");
    head.setUint32(16, 16, true);
    head.setUint16(20, 1, true);
    head.setUint16(22, 1, true);
    head.setUint32(24, RATE, true);
    head.setUint32(28, 2 * RATE, true);
    head.setUint16(32, 2, true);
    head.setUint16(34, 16, true);
    text(36, "data");
    head.setUint32(40, size, true);
    return new Blob([head, ...blocks], { type: "audio/wav" });
}

// ---- Sound -----------------------------------------------------------------------------------------------------

/** Plays what the worklet is given, and knows how much of it was heard. */
class Speaker {
    listeners = new Map(); // clip that has not ended → {started, ended}
    flushes = new Map();

    /**
     * Returns whether sound is played; some browsers wait for ever where there is no device for it. Call it in answer to
     * a key or a click first: browsers play no sound before.
     */
    async open() {
        const late = new Promise((resolve) => setTimeout(resolve, MAX_OPENING, false));
        this.opening ??= this.make();
        const resumed = this.opening.then(() => this.context.resume());
        return Promise.race([resumed.then(() => true), late]).catch(() => {
            this.opening = undefined;
            return false;
        });
    }

    async make() {
        this.context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
        await this.context.audioWorklet.addModule(new URL("audio.js", import.meta.url));
        this.node = new AudioWorkletNode(this.context, "player", { outputChannelCount: [1] });
        this.node.connect(this.context.destination);
        this.node.port.onmessage = ({ data }) => this.note(data);
    }

    note({ started, ended, flushed, gaps, clips }) {
        if (started !== undefined) this.listeners.get(started)?.started();
        else if (ended !== undefined) {
            const listener = this.listeners.get(ended);
            this.listeners.delete(ended);
            listener?.ended(gaps);
        } else if (this.flushes.has(flushed)) {
            const late = 1000 * (this.context.outputLatency || 0); // played, and not heard yet
            const heard = clips.map((each) => [each.id, Math.max(0, Math.floor((1000 * each.samples) / RATE - late))]);
            this.flushes.get(flushed)(new Map(heard));
            this.flushes.delete(flushed);
        }
    }

    get isPlaying() {
        return this.listeners.size > 0;
    }

    listen(id, listener) {
        this.listeners.set(id, listener);
    }

    play(id, samples) {
        if (samples.length) this.node?.port.postMessage({ play: id, samples }, [samples.buffer]);
    }

    end(id) {
        this.node?.port.postMessage({ end: id });
    }

    /** Stops at once. Returns the clips that were cut, with the milliseconds that were heard of each. */
    async flush() {
        this.listeners.clear();
        if (!this.node) return new Map();
        return new Promise((resolve) => {
            const number = this.flushes.size + performance.now();
            this.flushes.set(number, resolve);
            this.node.port.postMessage({ flush: number });
            setTimeout(() => this.note({ flushed: number, clips: [] }), 500); // the browser may have suspended the sound
        });
    }
}

const speaker = new Speaker();

/** The microphone, open until `close`. `listener` gets {samples, level} every 40 ms. */
class Microphone {
    static async open(listener) {
        if (!navigator.mediaDevices) throw new Error("Browsers give pages a microphone on localhost and over HTTPS only.");
        const made = new Microphone();
        try {
            made.stream = await navigator.mediaDevices.getUserMedia({
                audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 },
            });
        } catch (error) {
            const isRefused = error.name === "NotAllowedError";
            throw new Error(isRefused ? "The browser does not let this page use the microphone." : `No microphone: ${error.message}`);
        }
        try {
            await made.connect(RATE, listener);
        } catch {
            made.context?.close();
            await made.connect(undefined, listener); // this browser captures at the rate of the device only
        }
        return made;
    }

    async connect(sampleRate, listener) {
        this.context = new AudioContext({ sampleRate });
        const source = this.context.createMediaStreamSource(this.stream);
        await this.context.audioWorklet.addModule(new URL("audio.js", import.meta.url));
        const node = new AudioWorkletNode(this.context, "microphone", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
        node.port.onmessage = ({ data }) => {
            ui.level.firstElementChild.style.setProperty("--level", Math.min(1, 4 * data.level).toFixed(2));
            listener(data);
        };
        source.connect(node);
    }

    mute(isMuted) {
        for (const track of this.stream.getTracks()) track.enabled = !isMuted;
    }

    close() {
        for (const track of this.stream.getTracks()) track.stop();
        this.context.close();
    }
}

// ---- Server ----------------------------------------------------------------------------------------------------

const address = (path) => new URL(path, document.baseURI);
const authorization = () => (ui.key.value.trim() ? { authorization: `Bearer ${ui.key.value.trim()}` } : {});

async function request(path, body, signal) {
    const headers = { ...authorization(), ...(body && { "content-type": "application/json" }) };
    let response;
    try {
        response = await fetch(address(path), { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
        throw error.name === "AbortError" ? error : new Error("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
        ui.panel.open = true;
        ui.key.focus();
        throw new Error(ui.key.value ? "The server does not accept this API key." : "The server needs an API key.");
    }
    const text = await response.text();
    let error;
    try {
        ({ error } = JSON.parse(text));
    } catch {
        error = { message: `The server, or a proxy before it, answered ${response.status}.` };
    }
    throw Object.assign(new Error(error.message), { code: error.code });
}

/** The JSON objects of a stream of server-sent events. */
async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const lines = (text + value).split("\n");
        text = lines.pop();
        for (const line of lines) {
            if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
            const event = JSON.parse(line.slice(5));
            if (event.error) throw new Error(event.error.message);
            yield event;
        }
    }
}

async function readServer() {
    try {
        const health = await (await request("health")).json();
        server.model = health.model;
        server.inputs = health.input_modalities;
        server.routes = health.routes;
        server.hasSpeech = health.output_modalities.includes("audio");
        ui.model.textContent = health.model;
        document.title = `${health.model} – ${NAME}`;
        ui.live.disabled = ui.record.disabled = !server.inputs.includes("audio") || !canChat();
        ui.voice.disabled = ui.speak.disabled = !server.hasSpeech;
        ui.speak.checked &&= server.hasSpeech;
        ui.draw.disabled = !health.output_modalities.includes("image");
        ui.draw.checked &&= !ui.draw.disabled;
        if (!canChat()) ui.text.placeholder = "Text to speak: this model does not chat";
        await readVoices();
        say("");
    } catch (error) {
        say(error.message, true);
    }
}

const canChat = () => server.routes.includes("/v1/chat/completions");

async function readVoices() {
    const list = await (await request("v1/audio/voices")).json();
    const chosen = ui.voice.value || list.default;
    ui.voice.replaceChildren(...list.voices.map((name) => new Option(name, name, false, name === chosen)));
}

// ---- Conversation ----------------------------------------------------------------------------------------------

/** One message of the conversation, and what shows it. `parts`: what the model is told of it. */
class Turn {
    times = {};
    start = performance.now();

    constructor(role, parts = []) {
        this.role = role;
        this.parts = parts;
        this.paragraph = element("p", { dir: "auto", hidden: true });
        this.footer = element("footer", { hidden: true });
        const heading = element("h3", { textContent: role === "user" ? "You" : "Model" });
        this.box = element("article", { className: role }, heading, this.paragraph, this.footer);
        for (const part of parts) this.show(part);
        conversation.push(this);
        ui.welcome.hidden = true;
        ui.log.append(this.box);
        scrollToEnd();
    }

    show({ kind, text, name, preview }) {
        if (kind === "text") return this.setText(text);
        const shown = kind === "image" ? element("img", { src: preview, alt: `Picture: ${name}` }) : element(kind, { src: preview, controls: true });
        if (kind !== "image") shown.setAttribute("aria-label", `${kind === "video" ? "Video" : "Clip"}: ${name}`);
        this.paragraph.before(shown);
    }

    get text() {
        return this.paragraph.textContent;
    }

    /** A screen reader waits until all of it is there. */
    set isBusy(value) {
        this.box.classList.toggle("busy", value);
        this.box.setAttribute("aria-busy", value);
        this.paragraph.hidden = !value && !this.text;
    }

    setText(text) {
        const follows = isAtEnd();
        this.paragraph.textContent = text;
        this.paragraph.hidden = false;
        this.parts = [...this.parts.filter((each) => each.kind !== "text"), ...(text ? [{ kind: "text", text }] : [])];
        if (follows) scrollToEnd();
    }

    add(text) {
        if (!text) return;
        this.mark("firstText");
        this.setText(this.text + text);
    }

    /** Shows a picture of the answer, a data URL, which later requests repeat. */
    draw(url) {
        const [, type, data] = /^data:(.*?);base64,(.*)$/.exec(url);
        const part = { kind: "image", name: "drawn by the model", data, type, preview: url };
        this.mark("picture");
        this.parts.push(part);
        this.show(part);
    }

    mark(moment) {
        this.times[moment] ??= performance.now() - this.start;
        if (this === Turn.last) showTimes(this.times);
    }

    note(text, isProblem = false) {
        const follows = isAtEnd();
        this.footer.hidden = false;
        this.footer.append(element("div", { textContent: text, className: isProblem ? "problem" : "" }));
        if (follows) scrollToEnd();
    }

    remove() {
        this.box.remove();
        conversation = conversation.filter((each) => each !== this);
    }

    /** An answer that begins; `since`: what its times are measured from. */
    static answer(since) {
        const made = new Turn("assistant");
        made.isBusy = true;
        Turn.last = made;
        ui.timesNote.textContent = `Measured in this page, from ${since}.`;
        showTimes({}, {});
        return made;
    }

    end(stages) {
        this.isBusy = false;
        if (this === Turn.last) showTimes(this.times, stages);
        const { firstText, firstAudio, picture } = this.times;
        const shown = [["first text", firstText], ["first sound", firstAudio], ["picture", picture]].filter(([, time]) => time !== undefined);
        if (shown.length) this.note(shown.map(([name, time]) => `${name} ${milliseconds(time)}`).join(" · "));
    }
}

/** `stages`: the server's `timings_ms`. */
function showTimes(times, stages) {
    ui.firstAudio.textContent = milliseconds(times.firstAudio);
    ui.firstText.textContent = milliseconds(times.firstText);
    if (!stages) return;
    const rows = Object.entries(STAGES).filter(([name]) => name in stages);
    const last = Math.max(1, ...rows.map(([name]) => stages[name]));
    ui.stages.hidden = !rows.length;
    ui.stageRows.replaceChildren(...rows.map(([name, label]) => {
        const bar = element("div", { className: "bar" });
        bar.style.setProperty("--part", stages[name] / last);
        const cell = element("td", { ariaHidden: "true" }, bar);
        return element("tr", {}, element("th", { scope: "row", textContent: label }), element("td", { textContent: stages[name].toFixed(0) }), cell);
    }));
}

/** The content of a chat's message. */
function contentOf(parts) {
    if (parts.every((part) => part.kind === "text")) return parts.map((part) => part.text).join("");
    return parts.map(({ kind, text, data, type }) => {
        const url = `data:${type};base64,${data}`;
        if (kind === "text") return { type: "text", text };
        if (kind === "audio") return { type: "input_audio", input_audio: { data, format: "wav" } };
        return kind === "image" ? { type: "image_url", image_url: { url } } : { type: "video_url", video_url: { url } };
    });
}

/** A part of a realtime item. */
async function itemPart({ kind, text, name, data, type }, role) {
    if (kind === "text") return { type: role === "user" ? "input_text" : "output_text", text };
    if (role !== "user") throw new Error("A live conversation takes no pictures of an answer.");
    if (kind === "video") throw new Error("A live conversation takes no videos. End it to send one.");
    if (kind === "audio") data = await pcmOf(data, name);
    if (data.length > MAX_PART) throw new Error(`${name} is too large for a live conversation.`);
    return kind === "audio" ? { type: "input_audio", audio: data } : { type: "input_image", image_url: `data:${type};base64,${data}` };
}

/** A clip as base64 of 16-bit samples. */
async function pcmOf(data, name) {
    const file = Uint8Array.from(atob(data), (each) => each.charCodeAt(0)).buffer;
    const clip = await speaker.context.decodeAudioData(file).catch(() => {
        throw new Error(`This browser cannot decode ${name}.`);
    });
    const samples = new Float32Array(clip.length);
    for (let channel = 0; channel < clip.numberOfChannels; channel++) {
        clip.getChannelData(channel).forEach((sample, i) => (samples[i] += sample / clip.numberOfChannels));
    }
    return base64(new Uint8Array(Int16Array.from(samples, (each) => Math.round(32767 * Math.max(-1, Math.min(1, each)))).buffer));
}

function takeMessage() {
    const text = ui.text.value.trim();
    const parts = [...attachments, ...(text ? [{ kind: "text", text }] : [])];
    ui.text.value = "";
    attachments = [];
    showAttachments();
    return parts;
}

/** Puts a message that was not sent back, unless another one is being written. */
function returnMessage(parts) {
    if (ui.text.value || attachments.length) return;
    ui.text.value = parts.find((each) => each.kind === "text")?.text ?? "";
    attachments = parts.filter((each) => each.kind !== "text");
    showAttachments();
}

function callTool(name) {
    if (name !== GET_TIME.name) return JSON.stringify({ error: `There is no tool ${name}.` });
    const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
    return JSON.stringify({ local_time: new Date().toString(), time_zone: timeZone });
}

// ---- Chat over HTTP --------------------------------------------------------------------------------------------

async function chat(parts) {
    answer?.abort();
    const stopping = (answer = new AbortController());
    await speaker.flush();
    const isHeard = (canChat() && !(ui.speak.checked && !ui.draw.checked)) || (await speaker.open());
    const user = new Turn("user", parts);
    const reply = Turn.answer("sending");
    setPhase("thinking");
    try {
        if (!isHeard && !canChat()) throw new Error(NO_SOUND);
        if (!isHeard) reply.note(withoutSound());
        if (canChat()) await chatRounds(reply, stopping.signal);
        else await speakText(reply, user.text, stopping.signal);
    } catch (error) {
        reply.end();
        if (error.name === "AbortError") reply.note("Stopped.");
        else if (reply.text) reply.note(error.message, true);
        else { // the next request must not fail of this one
            user.remove();
            reply.remove();
            returnMessage(parts);
            say(error.message, true);
        }
    }
    if (answer !== stopping) return;
    answer = null;
    setPhase(speaker.isPlaying ? "speaking" : "ready");
}

/** The answers come as text, until the user wants to hear them again. Returns what to say about it. */
function withoutSound() {
    ui.speak.checked = false;
    return `${NO_SOUND} The answers come as text.`;
}

async function chatRounds(reply, signal) {
    const said = conversation.filter((each) => each !== reply && each.parts.length);
    const messages = said.map(({ role, parts }) => ({ role, content: contentOf(parts) }));
    if (ui.instructions.value.trim()) messages.unshift({ role: "system", content: ui.instructions.value.trim() });
    const isDrawn = ui.draw.checked;
    const isSpoken = ui.speak.checked && !isDrawn;
    for (let round = 0; round < MAX_ROUNDS; round++) {
        const body = { model: server.model, messages, stream: true, stream_options: { include_usage: true } };
        if (isSpoken) Object.assign(body, { modalities: ["text", "audio"], audio: { voice: ui.voice.value, format: "pcm16" } });
        if (isDrawn) body.modalities = ["image"];
        else if (ui.tools.checked) body.tools = [{ type: "function", function: GET_TIME }];
        const response = await request("v1/chat/completions", body, signal);
        const { calls, text, stages } = await readAnswer(reply, response, isSpoken);
        if (!calls.length) return reply.end(stages);
        messages.push({ role: "assistant", content: text || null, tool_calls: calls });
        for (const call of calls) {
            reply.note(`The model called ${call.function.name}.`);
            messages.push({ role: "tool", tool_call_id: call.id, content: callTool(call.function.name) });
        }
    }
    throw new Error(`The model called tools ${MAX_ROUNDS} times, and was not asked again.`);
}

/** Shows and plays one streamed answer. */
async function readAnswer(reply, response, isSpoken) {
    const sound = isSpoken && new Sound(reply);
    const calls = [];
    let text = "";
    let stages;
    try {
        for await (const chunk of events(response)) {
            for (const { delta, finish_reason } of chunk.choices) {
                if (Array.isArray(delta.content)) for (const { image_url } of delta.content) reply.draw(image_url.url);
                else {
                    text += delta.content ?? "";
                    reply.add(delta.content);
                }
                if (sound && delta.audio?.data) sound.add(delta.audio.data);
                for (const call of delta.tool_calls ?? []) {
                    calls[call.index] ??= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
                    calls[call.index].function.arguments += call.function.arguments;
                }
                if (finish_reason === "length") reply.note("The answer reached its limit of tokens.");
            }
            stages = chunk.timings_ms ?? stages;
            if (chunk.speech_error) reply.note(chunk.speech_error.message);
        }
    } finally {
        if (sound) sound.end();
    }
    return { calls, text, stages };
}

async function speakText(reply, input, signal) {
    const body = { model: server.model, input, voice: ui.voice.value, response_format: "pcm", stream_format: "sse" };
    const sound = new Sound(reply);
    try {
        for await (const event of events(await request("v1/audio/speech", body, signal))) if (event.audio) sound.add(event.audio);
    } finally {
        sound.end();
    }
    reply.end();
}

/** The speech of one answer on its way to the speaker. */
class Sound {
    static number = 0;

    constructor(reply, id = `chat-${Sound.number++}`) {
        this.reply = reply;
        this.id = id;
        this.pcm = new Pcm();
        speaker.listen(id, { started: () => setPhase("speaking"), ended: (gaps) => this.ended(gaps) });
    }

    add(text) {
        this.reply.mark("firstAudio");
        speaker.play(this.id, this.pcm.decode(text));
    }

    end() {
        speaker.end(this.id);
    }

    ended(gaps) {
        if (gaps) this.reply.note(`The sound came too late ${gaps === 1 ? "once" : `${gaps} times`}.`);
        setPhase(live ? "listening" : answer ? "thinking" : "ready");
    }
}

// ---- Live conversation -----------------------------------------------------------------------------------------

/** A session of /v1/realtime with an open microphone. The server hears when a turn begins and ends. */
class Live {
    turns = new Map(); // item → Turn
    sounds = new Map(); // item → Sound that is still coming
    silenced = new Set(); // responses that were stopped: what is on its way of them is not played
    response = null; // the id of the one that runs
    isOpen = false;

    async start() {
        setPhase("connecting");
        const isHeard = (await speaker.open()) || !ui.speak.checked;
        this.problem = isHeard ? "" : ` ${withoutSound()}`;
        this.microphone = await Microphone.open(({ samples }) => this.hear(samples));
        if (live !== this) return this.microphone.close(); // ended meanwhile
        const url = address("v1/realtime");
        url.protocol = url.protocol.replace("http", "ws");
        url.searchParams.set("model", server.model);
        const key = ui.key.value.trim();
        try {
            this.socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
        } catch {
            throw new Error("A browser cannot send this API key over a WebSocket: it has characters such as / or =.");
        }
        this.socket.onmessage = ({ data }) => this.handle(JSON.parse(data)).catch(endLive);
        this.socket.onclose = ({ code, reason }) => this.closed(code, reason);
    }

    send(event) {
        if (this.socket.readyState !== WebSocket.OPEN) return;
        if (this.socket.bufferedAmount > MAX_UNSENT) endLive(new Error("The connection is too slow for a live conversation."));
        else this.socket.send(JSON.stringify(event));
    }

    hear(samples) {
        if (this.isOpen) this.send({ type: "input_audio_buffer.append", audio: base64(new Uint8Array(samples.buffer)) });
    }

    /** What may change during a session. */
    update(input) {
        const session = {
            type: "realtime",
            instructions: ui.instructions.value.trim(),
            output_modalities: [ui.speak.checked ? "audio" : "text"],
            tools: ui.tools.checked ? [{ type: "function", ...GET_TIME }] : [],
            audio: { ...(ui.voice.value && { output: { voice: ui.voice.value } }), ...(input && { input }) },
        };
        this.send({ type: "session.update", session });
    }

    async closed(code, reason) {
        if (live !== this) return;
        let problem = code === 1000 ? "The live conversation has ended." : `The live conversation was cut off: ${reason || code}.`;
        if (!this.isOpen) {
            problem = "The server refused the live conversation.";
            const why = await request("v1/realtime").catch((error) => error); // browsers do not show why
            if (why instanceof Error && why.code !== "websocket_required") problem = why.message;
        }
        endLive(new Error(problem));
    }

    async handle(event) {
        const turn = this.turns.get(event.item_id);
        const isSilenced = this.silenced.has(event.response_id);
        switch (event.type) {
            case "session.created":
                return this.update({ transcription: { model: server.model }, turn_detection: { type: "server_vad" } });
            case "session.updated":
                return this.isOpen || this.begin();
            case "input_audio_buffer.speech_started":
                setPhase("hearing");
                return this.silence();
            case "input_audio_buffer.speech_stopped":
                this.turnEnd = performance.now();
                return setPhase("thinking");
            case "conversation.item.added":
                return this.added(event.item);
            case "conversation.item.input_audio_transcription.delta":
                return turn?.add(event.delta);
            case "conversation.item.input_audio_transcription.completed":
                turn?.setText(event.transcript);
                return turn && this.transcribed(turn);
            case "conversation.item.input_audio_transcription.failed":
                return turn && this.transcribed(turn);
            case "conversation.item.truncated":
                turn?.note(`Interrupted: ${(event.audio_end_ms / 1000).toFixed(1)} s were heard.`);
                return this.send({ type: "conversation.item.retrieve", item_id: event.item_id });
            case "conversation.item.retrieved": // the words that were heard
                return this.turns.get(event.item.id)?.setText(event.item.content.map((part) => part.transcript ?? "").join(""));
            case "response.created":
                this.response = event.response.id;
                return setPhase("thinking");
            case "response.content_part.added":
                return event.part.type === "audio" && this.sounds.set(event.item_id, new Sound(turn, event.item_id));
            case "response.output_audio_transcript.delta":
            case "response.output_text.delta":
                return isSilenced || turn?.add(event.delta);
            case "response.output_audio.delta":
                return isSilenced || this.sounds.get(event.item_id)?.add(event.delta);
            case "response.output_audio.done":
                this.sounds.get(event.item_id)?.end();
                return this.sounds.delete(event.item_id);
            case "response.output_item.done":
                return event.item.type === "function_call" && this.call(event.item);
            case "response.done":
                return this.done(event.response);
            case "error":
                return event.error.code === "response_cancel_not_active" || say(event.error.message, true);
        }
    }

    /** Sends what was said before, and opens the microphone. */
    async begin() {
        for (const turn of [...conversation]) await this.create(turn, true);
        if (live !== this) return;
        this.isOpen = true;
        say(`The microphone is open.${this.problem}`);
        setPhase("listening");
    }

    /** Creates the item of a turn. `isReplay`: without what a live conversation cannot take. */
    async create({ role, parts }, isReplay) {
        const found = await Promise.allSettled(parts.map((part) => itemPart(part, role)));
        const failed = found.find((each) => each.reason);
        if (failed && !isReplay) throw failed.reason;
        const content = found.filter((each) => each.value).map((each) => each.value);
        if (!content.length) return;
        const id = `item_${crypto.getRandomValues(new Uint32Array(3)).join("_")}`;
        this.turns.set(id, null); // it is shown already
        this.send({ type: "conversation.item.create", item: { id, type: "message", role, content } });
    }

    added(item) {
        if (item.type !== "message" || this.turns.has(item.id)) return;
        if (item.role === "user") {
            const turn = new Turn("user");
            turn.isBusy = true;
            this.turns.set(item.id, turn);
        } else {
            const turn = Turn.answer("the end of your turn");
            turn.start = this.turnEnd ?? turn.start;
            this.turns.set(item.id, turn);
        }
    }

    transcribed(turn) {
        turn.isBusy = false;
        if (!turn.text && turn.role === "user") turn.note("Spoken; there is no text of it.");
    }

    /** Stops the speaker, and tells the server how much of each answer was heard. Returns how many were cut. */
    async silence() {
        const coming = [...this.sounds.keys()];
        this.sounds.clear();
        const cut = await speaker.flush();
        for (const item of coming) if (!cut.has(item)) cut.set(item, 0); // nothing has come of it
        for (const [item_id, audio_end_ms] of cut) this.send({ type: "conversation.item.truncate", item_id, content_index: 0, audio_end_ms });
        return cut.size;
    }

    /** The user's Stop. Returns whether there was anything to stop. */
    async stop() {
        const response = this.response;
        if (response) {
            this.silenced.add(response);
            this.send({ type: "response.cancel", response_id: response });
        }
        const count = await this.silence();
        if (live === this) setPhase("listening");
        return Boolean(response || count);
    }

    async write(parts) {
        await this.stop();
        await this.create({ role: "user", parts });
        new Turn("user", parts);
        this.turnEnd = performance.now();
        this.send({ type: "response.create" });
        setPhase("thinking");
    }

    call({ name, call_id }) {
        this.hasCalls = true;
        say(`The model called ${name}.`);
        this.send({ type: "conversation.item.create", item: { type: "function_call_output", call_id, output: callTool(name) } });
    }

    done({ status, status_details, output, timings_ms }) {
        this.response = null;
        for (const { id } of output) {
            const turn = this.turns.get(id);
            if (status === "incomplete") turn?.note("The answer reached its limit of tokens.");
            turn?.end(timings_ms);
        }
        if (status === "failed") say(status_details.error.message, true);
        const goesOn = this.hasCalls && status === "completed";
        this.hasCalls = false;
        if (goesOn) this.send({ type: "response.create" });
        const { phase } = ui.phase.dataset;
        setPhase(phase === "thinking" && !goesOn && !speaker.isPlaying ? "listening" : phase);
    }

    close() {
        this.microphone?.close();
        if (this.socket) this.socket.onclose = null;
        this.socket?.close(1000);
        for (const turn of this.turns.values()) if (turn) this.transcribed(turn);
    }
}

function startLive() {
    live = new Live();
    ui.live.setAttribute("aria-pressed", true);
    ui.record.disabled = true;
    live.start().catch(endLive);
}

function endLive(problem) {
    const ended = live;
    live = null;
    ended?.close();
    speaker.flush();
    ui.live.setAttribute("aria-pressed", false);
    ui.mute.setAttribute("aria-pressed", false);
    ui.record.disabled = ui.live.disabled;
    say(problem?.message ?? "The microphone is closed.", Boolean(problem));
    setPhase("ready");
}

// ---- Controls --------------------------------------------------------------------------------------------------

async function startRecording() {
    answer?.abort();
    const blocks = [];
    const made = (recording = { blocks });
    try {
        await speaker.flush();
        made.microphone = await Microphone.open(({ samples }) => {
            blocks.push(samples);
            const seconds = Math.floor((blocks.length * samples.length) / RATE);
            ui.phase.textContent = `${PHASES.recording} ${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
        });
        if (recording !== made) return made.microphone.close(); // ended meanwhile
        ui.record.setAttribute("aria-pressed", true);
        setPhase("recording");
    } catch (error) {
        recording = null;
        say(error.message, true);
    }
}

/** Closes the microphone. `isKept`: the clip becomes a part of the next message. */
async function endRecording(isKept) {
    const { microphone, blocks } = recording;
    recording = null;
    microphone?.close();
    ui.record.setAttribute("aria-pressed", false);
    setPhase("ready");
    if (isKept && blocks.length) await attach([new File([wav(blocks)], "recording.wav", { type: "audio/wav" })]);
}

async function attach(files) {
    for (const file of files) {
        const kind = file.type.split("/")[0];
        if (!["image", "audio", "video"].includes(kind) || !server.inputs.includes(kind)) {
            say(`${file.name} is no ${server.inputs.filter((each) => each !== "text").join(", ")} for this model.`, true);
            continue;
        }
        const data = base64(new Uint8Array(await file.arrayBuffer()));
        attachments.push({ kind, name: file.name, data, type: file.type, preview: URL.createObjectURL(file) });
        say(`Added ${file.name}.`);
    }
    showAttachments();
}

function showAttachments() {
    ui.attachments.replaceChildren(...attachments.map((part) => {
        const remove = element("button", { type: "button", textContent: "Remove", ariaLabel: `Remove ${part.name}` });
        remove.onclick = () => {
            attachments = attachments.filter((each) => each !== part);
            URL.revokeObjectURL(part.preview);
            showAttachments();
            ui.text.focus();
        };
        const picture = part.kind === "image" ? [element("img", { src: part.preview, alt: "" })] : [];
        return element("li", {}, ...picture, element("span", { textContent: part.name }), remove);
    }));
}

async function submit() {
    if (live && !live.isOpen) return;
    if (recording) await endRecording(true);
    const parts = takeMessage();
    if (!parts.length) return;
    say("");
    try {
        await (live ? live.write(parts) : chat(parts));
    } catch (error) {
        returnMessage(parts);
        say(error.message, true);
    }
}

async function stop() {
    if (recording) return endRecording(false);
    if (live) return (live.isOpen && (await live.stop())) || endLive();
    answer?.abort();
    await speaker.flush();
    setPhase("ready");
}

ui.composer.onsubmit = (event) => {
    event.preventDefault();
    submit();
};
ui.text.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
};
document.onkeydown = (event) => {
    if (event.key === "Escape" && (answer || recording || live || speaker.isPlaying)) stop();
};
ui.stop.onclick = stop;
ui.record.onclick = () => (recording ? endRecording(true) : startRecording());
ui.live.onclick = () => (live ? endLive() : startLive());
ui.mute.onclick = () => {
    const isMuted = ui.mute.getAttribute("aria-pressed") !== "true";
    ui.mute.setAttribute("aria-pressed", isMuted);
    live.microphone.mute(isMuted);
    say(isMuted ? "The microphone is muted." : "The microphone is open.");
};
ui.files.onchange = async () => {
    await attach(ui.files.files);
    ui.files.value = "";
};
document.onpaste = (event) => attach(event.clipboardData.files);
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
};
ui.key.onchange = readServer;
ui.key.onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // else it goes on to the message
    ui.panel.open = wide.matches;
    ui.text.focus();
};
for (const each of [ui.voice, ui.speak, ui.tools, ui.instructions]) each.onchange = () => live?.isOpen && live.update();
ui.clear.onclick = async () => {
    if (live) endLive();
    else await stop();
    for (const { preview } of conversation.flatMap((turn) => turn.parts)) if (preview) URL.revokeObjectURL(preview);
    conversation = [];
    ui.log.replaceChildren();
    ui.welcome.hidden = false;
    showTimes({}, {});
    say("");
    ui.text.focus();
};
const wide = window.matchMedia("(min-width: 56rem)");
wide.onchange = () => (ui.panel.open = wide.matches);
wide.onchange();
ui.text.focus();
readServer();
