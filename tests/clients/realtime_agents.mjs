// OpenAI's Agents SDK for JavaScript: a spoken conversation over its realtime session.

import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession, tool } from "@openai/agents-realtime";
import assert from "node:assert";
import { text } from "node:stream/consumers";
import { setTimeout as sleep } from "node:timers/promises";
import { z } from "zod";

const CHUNK_MS = 40;
const given = JSON.parse(await text(process.stdin));
const base = given.url.replace("http:", "ws:");
const [first, second] = given.turns.map((each) => Buffer.from(each, "base64"));
setTimeout(() => { throw new Error("the conversation takes too long"); }, 240_000).unref();

/** A connected session, and what it has reported; an error fails the conversation. */
async function open(tools, maxTokens) {
    const transport = new OpenAIRealtimeWebSocket({
        url: `${base}/realtime?model=${given.model}`,
        useInsecureApiKey: true,
    });
    const agent = new RealtimeAgent({ name: "a", instructions: "Answer briefly.", voice: given.voice, tools });
    const providerData = { max_output_tokens: maxTokens, parallel_tool_calls: false };
    const session = new RealtimeSession(agent, { transport, model: given.model, config: { providerData, toolChoice: "none" } });
    const heard = { events: [], bytes: 0, interruptions: 0, seen: 0 };
    session.on("error", ({ error }) => { throw new Error(JSON.stringify(error)); });
    session.on("audio", (event) => { heard.bytes += event.data.byteLength; });
    session.on("audio_interrupted", () => { heard.interruptions += 1; });
    session.on("transport_event", (event) => { heard.events.push(event); });
    heard.next = async (type) => {
        for (;;) {
            while (heard.seen < heard.events.length) {
                const event = heard.events[heard.seen++];
                if (event.type === type) return event;
            }
            await sleep(5);
        }
    };
    await session.connect({ apiKey: given.key });
    return { session, heard };
}

/** Send sound as a microphone does. */
async function say(session, speech) {
    const size = CHUNK_MS * 48;
    for (let start = 0; start < speech.length; start += size) {
        session.sendAudio(new Uint8Array(speech.subarray(start, start + size)).buffer);
        await sleep(CHUNK_MS);
    }
}

const calls = [];
const weather = tool({
    name: "get_weather",
    description: "Weather of a city.",
    parameters: z.object({ city: z.enum(["Genève", "Zürich"]) }),
    execute: async ({ city }) => {
        calls.push(city);
        choose("none"); // a random model would call on
        return `18 °C in ${city}`;
    },
});
const { session, heard } = await open([weather], 60);
const choose = (choice) =>
    session.transport.sendEvent({ type: "session.update", session: { type: "realtime", tool_choice: choice } });

session.transport.requestResponse({ instructions: "Greet." });
await heard.next("response.output_audio.delta");
session.transport.sendEvent({ type: "response.cancel" }); // a greeting that is stopped
assert.equal((await heard.next("response.done")).response.status_details.reason, "client_cancelled");
assert.ok(heard.bytes > 0);

let speaking = say(session, first);
for (const type of ["speech_started", "speech_stopped", "committed"]) await heard.next(`input_audio_buffer.${type}`);
await heard.next("response.output_audio.delta");
await speaking;

speaking = say(session, second); // while the answer is spoken
const cancelled = (await heard.next("response.done")).response;
assert.equal(cancelled.status, "cancelled");
assert.equal(cancelled.status_details.reason, "turn_detected");
const cut = await heard.next("conversation.item.truncated"); // the SDK asks for it, and reads the item again
const kept = (await heard.next("conversation.item.retrieved")).item;
assert.equal(kept.id, cut.item_id);
assert.equal(kept.id, cancelled.output[0].id);
assert.ok(heard.interruptions >= 1);
choose("required"); // for the answer after the one that comes now
await speaking;
await heard.next("response.done");

session.transport.requestResponse();
for (let num = 0; num < 2; num += 1) await heard.next("response.done"); // the call, and the answer to its result
assert.ok(calls.length >= 1 && ["Genève", "Zürich"].includes(calls[0]), calls);
const history = session.history;
const kinds = history.map((item) => item.type);
assert.ok(kinds.includes("function_call") && kinds.filter((kind) => kind === "message").length >= 4, kinds);
const result = history.find((item) => item.type === "function_call");
assert.match(result.output, /18 °C/);
session.close();

const again = await open([], 12);
const messages = history.filter((item) => item.type === "message"); // the SDK sends no calls again
for (const { content } of messages) // and asks for the text in the place of sound
    for (const part of content)
        if (part.type === "output_audio") Object.assign(part, { type: "output_text", text: part.transcript });
again.session.updateHistory(messages);
for (const _ of messages) await again.heard.next("conversation.item.done");
again.session.sendMessage("And now?");
const last = (await again.heard.next("response.done")).response;
assert.ok(["completed", "incomplete"].includes(last.status), JSON.stringify(last));
assert.ok(again.heard.bytes > 0);
again.session.close();
process.exit(0);
