// The server's own page in Chromium, with a recorded microphone: chats, then a live conversation with a scripted server,
// whose events are exact, and one with the real server. Screenshots and accessibility snapshots go beside the script.
// CHROMIUM: the browser's program (default /usr/bin/chromium).

import assert from "node:assert";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import axe from "axe-core";
import { chromium } from "playwright-core";

const given = JSON.parse(readFileSync(0, "utf8"));
const home = dirname(fileURLToPath(import.meta.url));
const root = new URL("/", given.url).href;
const picture = { name: "picture.png", mimeType: "image/png", buffer: Buffer.from(given.image, "base64") };
const RATE = 24000;

const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: [
        "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        `--use-file-for-fake-audio-capture=${given.microphone}`, "--autoplay-policy=no-user-gesture-required",
    ],
});

/** Opens the page with the key. `messages` collects what the browser's console says. */
async function open(width, colorScheme, standIn) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, permissions: ["microphone"] });
    const tab = await context.newPage();
    const messages = [];
    tab.on("console", (message) => ["error", "warning"].includes(message.type()) && messages.push(message.text()));
    tab.on("pageerror", (error) => messages.push(String(error)));
    if (standIn) await tab.routeWebSocket(/\/v1\/realtime/, standIn);
    await tab.route(/chat\/completions/, (route) => route.continue({ postData: { ...route.request().postDataJSON(), max_tokens: 12 } }));
    await tab.goto(root);
    await tab.getByText("The server needs an API key.").waitFor();
    assert.deepEqual(messages.splice(0).filter((each) => !each.includes("401")), []);
    assert.equal(await tab.evaluate("document.activeElement.id"), "key");
    await tab.keyboard.type(given.key);
    await tab.keyboard.press("Enter");
    await tab.locator("#voice option").first().waitFor({ state: "attached" });
    assert.deepEqual(await tab.evaluate("[document.activeElement.id, text.value]"), ["text", ""]);
    return { tab, messages, close: () => context.close() };
}

async function look(tab, name) {
    await tab.screenshot({ path: join(home, `${name}.png`) });
    writeFileSync(join(home, `${name}.yml`), await tab.locator("body").ariaSnapshot());
    await tab.evaluate(axe.source);
    const { violations } = await tab.evaluate("axe.run()");
    assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map((each) => each.html)]), [], name);
}

const phase = (tab, word) => tab.locator("#phase").getByText(word, { exact: true }).waitFor({ timeout: 60_000 });
const hidden = (tab, name) => tab.getByRole("button", { name }).waitFor({ state: "hidden" });
const answers = (tab) => tab.locator("article.assistant");
const settled = (tab, count) => answers(tab).nth(count - 1).getByText(/first (text|sound) \d+ ms/).waitFor({ timeout: 60_000 });

async function chats(width, colorScheme) {
    const { tab, messages, close } = await open(width, colorScheme);
    await tab.fill("#text", "How are you?");
    await tab.keyboard.press("Enter");
    await phase(tab, "Speaking");
    await tab.getByRole("button", { name: "Stop" }).waitFor();
    await tab.keyboard.press("Escape");
    await phase(tab, "Ready");
    await hidden(tab, "Stop");

    await tab.setInputFiles("#files", [picture]);
    await tab.getByRole("button", { name: "Remove picture.png" }).waitFor();
    await tab.getByRole("button", { name: "Record" }).click();
    await tab.locator("#phase").getByText(/Recording 0:0[2-9]/).waitFor();
    assert.equal(await tab.getByRole("button", { name: "Record", pressed: true }).count(), 1);
    const sent = tab.waitForRequest(/chat\/completions/);
    await tab.getByRole("button", { name: "Send" }).click();
    const body = (await sent).postDataJSON();
    const parts = body.messages.at(-1).content;
    assert.deepEqual(parts.map((each) => each.type), ["image_url", "input_audio"]);
    assert.equal(parts[0].image_url.url, `data:image/png;base64,${given.image}`);
    const clip = Buffer.from(parts[1].input_audio.data, "base64");
    assert.equal(clip.toString("latin1", 0, 4) + clip.readUInt32LE(24) + clip.readUInt32LE(40), `RIFF${RATE}${clip.length - 44}`);
    assert.ok(new Int16Array(clip.buffer.slice(clip.byteOffset + 44, clip.byteOffset + clip.length)).some((each) => each > 1000));
    assert.deepEqual([body.audio.voice, body.tools], [given.voice, undefined]);
    assert.deepEqual(body.messages.map((each) => each.role), ["user", "assistant", "user"]);
    await settled(tab, 2);
    await tab.locator("#stages").waitFor({ state: width < 900 ? "attached" : "visible" });
    assert.match(await tab.locator("#firstAudio").textContent(), /^\d+ ms$/);
    await look(tab, `chat-${width}`);

    await tab.evaluate("panel.open = true");
    await tab.getByLabel("Speak the answers").uncheck();
    await tab.getByLabel(/get_time/).check();
    await tab.fill("#text", "What is the time?");
    const silent = tab.waitForRequest(/chat\/completions/);
    await tab.locator("#text").press("Enter");
    const { modalities, tools } = (await silent).postDataJSON();
    assert.deepEqual([modalities, tools[0].function.name], [undefined, "get_time"]);
    await settled(tab, 3);
    await tab.getByRole("button", { name: "New conversation" }).click();
    await tab.getByText("Type, record a question, or talk live.").waitFor();
    assert.equal(await tab.locator("article").count(), 0);
    assert.deepEqual(messages, []);
    await close();
}

/** Where sound never starts, as in a browser without a device for it. */
async function withoutSound() {
    const { tab, close } = await open(1280, "light");
    await tab.evaluate("AudioContext.prototype.resume = () => new Promise(() => {})");
    await tab.fill("#text", "How are you?");
    const sent = tab.waitForRequest(/chat\/completions/);
    await tab.keyboard.press("Enter");
    assert.equal((await sent).postDataJSON().modalities, undefined);
    await settled(tab, 1);
    await answers(tab).getByText("This browser plays no sound").waitFor();
    assert.equal(await tab.locator("#speak").isChecked(), false);
    await tab.getByRole("button", { name: "Talk live" }).click();
    await phase(tab, "Listening");
    await close();
}

/** A chat that answers with a picture, by a stand-in for a model that draws; then it is sent back. */
async function drawings() {
    const { tab, messages, close } = await open(1280, "light");
    await tab.route(/\/health/, async (route) => {
        const response = await route.fetch();
        const json = await response.json();
        await route.fulfill({ response, json: { ...json, output_modalities: [...json.output_modalities, "image"] } });
    });
    const url = `data:image/png;base64,${given.image}`;
    const deltas = [{ role: "assistant", content: null }, { content: [{ type: "image_url", image_url: { url } }] }, {}];
    const chunks = deltas.map((delta, i) => ({ choices: [{ index: 0, delta, finish_reason: i === 2 ? "stop" : null }] }));
    const body = [...chunks.map((each) => JSON.stringify(each)), "[DONE]"].map((each) => `data: ${each}\n\n`).join("");
    await tab.route(/chat\/completions/, (route) => route.fulfill({ contentType: "text/event-stream", body }));
    await tab.evaluate("panel.open = true");
    assert.equal(await tab.getByLabel("Draw the answers").isDisabled(), true);
    await tab.fill("#key", `${given.key} `);
    await tab.locator("#key").blur(); // reads the server again
    await tab.getByLabel("Draw the answers").check();
    for (const [text, roles] of [["A cat", ["user"]], ["In blue", ["user", "assistant", "user"]]]) {
        await tab.fill("#text", text);
        const sent = tab.waitForRequest(/chat\/completions/);
        await tab.locator("#text").press("Enter");
        const request = (await sent).postDataJSON();
        assert.deepEqual([request.modalities, request.audio, request.tools], [["image"], undefined, undefined]);
        assert.deepEqual(request.messages.map((each) => each.role), roles);
        if (roles.length > 1) assert.deepEqual(request.messages[1].content, [{ type: "image_url", image_url: { url } }]);
        const shown = answers(tab).last().getByRole("img", { name: "Picture: drawn by the model" });
        await shown.waitFor();
        assert.equal(await shown.evaluate((each) => each.decode().then(() => each.naturalWidth)), 112);
        await answers(tab).last().getByText(/picture \d+ ms/).waitFor();
    }
    await look(tab, "drawing");
    assert.deepEqual(messages, []);
    await close();
}

/** A server whose events a test chooses. */
class StandIn {
    events = [];

    accept = (socket) => {
        this.socket = socket;
        socket.onMessage((text) => this.events.push(JSON.parse(text)));
        this.send({ type: "session.created" });
    };

    send(...events) {
        for (const event of events) this.socket.send(JSON.stringify({ event_id: "event_1", ...event }));
    }

    /** The next event of a type, which the page has sent after those that were asked for. */
    async next(type) {
        for (let tries = 0; tries < 400; tries++) {
            const index = this.events.findIndex((each) => each.type === type);
            if (index >= 0) return this.events.splice(0, index + 1).at(-1);
            await new Promise((resolve) => setTimeout(resolve, 50));
        }
        throw new Error(`no ${type}; there were ${[...new Set(this.events.map((each) => each.type))]}`);
    }

    userTurn(id, transcript) {
        this.send(
            { type: "input_audio_buffer.speech_started", item_id: id, audio_start_ms: 0 },
            { type: "input_audio_buffer.speech_stopped", item_id: id, audio_end_ms: 900 },
            { type: "conversation.item.added", previous_item_id: null, item: { id, type: "message", role: "user", content: [{ type: "input_audio", transcript: null }] } },
            { type: "conversation.item.input_audio_transcription.completed", item_id: id, content_index: 0, transcript },
        );
    }

    /** An answer of `seconds`, without its end. */
    answer(response_id, item_id, transcript, seconds) {
        const item = { id: item_id, type: "message", role: "assistant", status: "in_progress", content: [] };
        this.send(
            { type: "response.created", response: { id: response_id, status: "in_progress", output: [] } },
            { type: "response.output_item.added", response_id, output_index: 0, item },
            { type: "conversation.item.added", previous_item_id: null, item },
            { type: "response.content_part.added", response_id, item_id, output_index: 0, content_index: 0, part: { type: "audio", transcript: "" } },
        );
        this.speak(response_id, item_id, transcript, seconds);
    }

    speak(response_id, item_id, transcript, seconds) {
        const where = { response_id, item_id, output_index: 0, content_index: 0 };
        const samples = Int16Array.from({ length: RATE * seconds }, (_, i) => 3000 * Math.sin((2 * Math.PI * 440 * i) / RATE));
        const delta = Buffer.from(samples.buffer).toString("base64");
        this.send({ type: "response.output_audio_transcript.delta", ...where, delta: transcript });
        if (seconds) this.send({ type: "response.output_audio.delta", ...where, delta });
    }

    done(id, item, status) {
        this.send({ type: "response.output_audio.done", response_id: id, item_id: item }, { type: "response.done", response: { id, status, output: [{ id: item }], timings_ms: { first_audio: 40, done: 90 } } });
    }
}

async function scripted(width, colorScheme) {
    const server = new StandIn();
    const { tab, messages, close } = await open(width, colorScheme, server.accept);
    await tab.fill("#text", "Remember this.");
    await tab.keyboard.press("Enter");
    await settled(tab, 1);
    await tab.keyboard.press("Escape");

    await tab.getByRole("button", { name: "Talk live" }).click();
    const { session } = await server.next("session.update");
    assert.deepEqual(session, {
        type: "realtime", instructions: "", output_modalities: ["audio"], tools: [],
        audio: { input: { transcription: { model: given.model }, turn_detection: { type: "server_vad" } }, output: { voice: given.voice } },
    });
    assert.equal(server.events.length, 0, "nothing else before the settings hold");
    server.send({ type: "session.updated" });
    const replayed = (await server.next("conversation.item.create")).item;
    assert.deepEqual([replayed.role, replayed.content], ["user", [{ type: "input_text", text: "Remember this." }]]);
    assert.equal((await server.next("conversation.item.create")).item.content[0].type, "output_text");
    await phase(tab, "Listening");
    let loudest = 0;
    while (loudest < 1000) {
        const sound = Buffer.from((await server.next("input_audio_buffer.append")).audio, "base64");
        assert.equal(sound.length, 2 * 0.04 * RATE);
        loudest = Math.max(loudest, ...new Int16Array(sound.buffer.slice(sound.byteOffset, sound.byteOffset + sound.length)));
    }

    // Half a second has come, and is all that can have been heard when the user speaks: less what the device holds back.
    server.userTurn("user_1", "Tell me about mice.");
    await tab.getByText("Tell me about mice.").waitFor();
    server.answer("resp_1", "item_1", "Mice are small. They like cheese.", 0.5);
    await phase(tab, "Speaking");
    await tab.waitForTimeout(1000);
    await look(tab, `live-${width}`);
    server.send({ type: "input_audio_buffer.speech_started", item_id: "user_2", audio_start_ms: 2000 });
    const cut = await server.next("conversation.item.truncate");
    assert.deepEqual([cut.item_id, cut.content_index], ["item_1", 0]);
    assert.ok(Number.isInteger(cut.audio_end_ms) && cut.audio_end_ms > 350 && cut.audio_end_ms <= 500, `${cut.audio_end_ms}`);
    await phase(tab, "You are speaking");
    server.done("resp_1", "item_1", "cancelled");
    server.send({ ...cut, type: "conversation.item.truncated" });
    assert.equal((await server.next("conversation.item.retrieve")).item_id, "item_1");
    server.send({ type: "conversation.item.retrieved", item: { id: "item_1", type: "message", role: "assistant", content: [{ type: "output_audio", transcript: "Mice are small." }] } });
    await tab.getByText("Mice are small.", { exact: true }).waitFor();
    await tab.getByText(/^Interrupted: 0\.[345] s were heard\.$/).waitFor();

    // The user's Stop: what still comes of the answer is not played, and none of it counts as heard.
    server.userTurn("user_2", "Go on.");
    server.answer("resp_2", "item_2", "A long answer.", 10);
    await phase(tab, "Speaking");
    await tab.keyboard.press("Escape");
    assert.equal((await server.next("response.cancel")).response_id, "resp_2");
    const stopped = await server.next("conversation.item.truncate");
    assert.ok(stopped.audio_end_ms < 9000, `${stopped.audio_end_ms}`);
    server.speak("resp_2", "item_2", " More.", 1);
    await phase(tab, "Listening");
    server.done("resp_2", "item_2", "cancelled");
    assert.equal(await tab.getByText("More.").count(), 0);

    // The user speaks before any sound has come.
    server.userTurn("user_3", "And cats?");
    server.answer("resp_3", "item_3", "Cats sleep.", 0);
    await tab.getByText("Cats sleep.").waitFor();
    server.send({ type: "input_audio_buffer.speech_started", item_id: "user_4", audio_start_ms: 9000 });
    const unheard = await server.next("conversation.item.truncate");
    assert.deepEqual([unheard.item_id, unheard.audio_end_ms], ["item_3", 0]);
    server.done("resp_3", "item_3", "cancelled");

    // A typed turn and a call of a tool.
    await tab.setInputFiles("#files", [picture]);
    await tab.fill("#text", "What time is it here?");
    await tab.locator("#text").press("Enter");
    const { content } = (await server.next("conversation.item.create")).item;
    assert.deepEqual(content.map((each) => each.type), ["input_image", "input_text"]);
    await server.next("response.create");
    server.send(
        { type: "response.created", response: { id: "resp_3", output: [] } },
        { type: "response.output_item.done", response_id: "resp_3", output_index: 0, item: { id: "call", type: "function_call", name: "get_time", call_id: "call_1", arguments: "{}" } },
    );
    const result = (await server.next("conversation.item.create")).item;
    assert.deepEqual([result.type, result.call_id, Object.keys(JSON.parse(result.output))], ["function_call_output", "call_1", ["local_time", "time_zone"]]);
    server.send({ type: "response.done", response: { id: "resp_3", status: "completed", output: [] } });
    await server.next("response.create");
    server.answer("resp_4", "item_4", "It is noon.", 0.2);
    server.done("resp_4", "item_4", "completed");
    await phase(tab, "Listening");

    await tab.getByRole("button", { name: "Mute" }).click();
    await tab.getByRole("button", { name: "Mute", pressed: true }).waitFor();
    server.send({ type: "error", error: { type: "server_error", code: "internal_error", message: "Something failed." } });
    await tab.getByRole("status").getByText("Something failed.").waitFor();
    await tab.keyboard.press("Escape"); // nothing runs: ends the session
    await phase(tab, "Ready");
    assert.equal(await tab.getByRole("button", { name: "Talk live", pressed: false }).count(), 1);
    assert.deepEqual(messages, []);
    await close();
}

/** The real server hears the recording. Muting ends a turn; what is heard after it interrupts the answer. */
async function talks(width, colorScheme) {
    const types = [];
    const { tab, messages, close } = await open(width, colorScheme, (socket) => {
        const upstream = socket.connectToServer();
        socket.onMessage((text) => {
            const event = JSON.parse(text);
            if (event.type === "session.update") event.session.max_output_tokens = 12;
            upstream.send(JSON.stringify(event));
        });
        upstream.onMessage((text) => {
            types.push(JSON.parse(text).type);
            socket.send(text);
        });
    });
    await tab.getByRole("button", { name: "Talk live" }).click();
    await phase(tab, "Listening");
    const mute = tab.getByRole("button", { name: "Mute" });
    await phase(tab, "You are speaking");
    await mute.click();
    await phase(tab, "Speaking");
    await mute.click();
    await tab.getByText(/^Interrupted: (?!0\.0)\d+\.\d s were heard\.$/).first().waitFor({ timeout: 60_000 });
    await mute.click();
    await phase(tab, "Speaking");
    await look(tab, `talk-${width}`);
    await tab.keyboard.press("Escape");
    await hidden(tab, "Stop");
    await tab.fill("#text", "And now in writing.");
    await tab.locator("#text").press("Enter");
    await phase(tab, "Speaking");
    await tab.keyboard.press("Escape");
    await hidden(tab, "Stop");
    await tab.keyboard.press("Escape");
    await phase(tab, "Ready");
    assert.ok(!types.includes("error"), types.join(" "));
    assert.deepEqual(messages, []);
    await close();
}

try {
    await chats(1400, "light");
    await chats(400, "dark");
    await withoutSound();
    await drawings();
    await scripted(1400, "dark");
    await scripted(400, "light");
    await talks(1400, "light");
    await talks(400, "dark");
} finally {
    await browser.close();
}
