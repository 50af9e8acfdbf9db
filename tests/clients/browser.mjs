// The official OpenAI client in Chromium, on a page of another origin: CORS with the headers that the client sends.
// CHROMIUM: the browser's program (default /usr/bin/chromium).

import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import { dirname, join } from "node:path";
import { chromium } from "playwright-core";

const given = JSON.parse(readFileSync(0, "utf8"));
const root = dirname(fileURLToPath(import.meta.resolve("openai")));
const page = `<!doctype html><title>client</title><script type="module">
import OpenAI from "/openai/index.mjs";
const client = new OpenAI({ baseURL: ${JSON.stringify(given.url)}, apiKey: ${JSON.stringify(given.key)},
                            dangerouslyAllowBrowser: true, maxRetries: 0 });
const body = { model: ${JSON.stringify(given.model)}, max_tokens: 8, messages: [{ role: "user", content: "Hello" }] };
try {
    const whole = await client.chat.completions.create(body);
    let chunks = 0;
    for await (const _ of await client.chat.completions.create({ ...body, stream: true })) chunks += 1;
    const voice = ${JSON.stringify(given.voice)};
    const speech = await client.audio.speech.create({ model: body.model, voice, input: "Hello.", stream_format: "audio" });
    const bytes = (await speech.arrayBuffer()).byteLength;
    const file = await (await fetch("data:audio/wav;base64,${given.clip}")).blob();
    const asked = { model: body.model, file: new File([file], "clip.wav") };
    const { text } = await client.audio.transcriptions.create(asked); // a tone: nobody speaks
    window.outcome = { tokens: whole.usage.completion_tokens, chunks, bytes, text };
} catch (error) {
    window.outcome = { error: String(error) + String(error.cause ?? "") };
}
</script>`;
const pages = createServer((request, response) => {
    if (request.url === "/") return response.setHeader("content-type", "text/html").end(page);
    if (!request.url.startsWith("/openai/")) return response.writeHead(404).end();
    response.setHeader("content-type", "text/javascript");
    response.end(readFileSync(join(root, request.url.slice("/openai/".length))));
});
await new Promise((ready) => pages.listen(given.page_port, "127.0.0.1", ready));

const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
});
try {
    const tab = await browser.newPage();
    await tab.goto(`http://127.0.0.1:${given.page_port}/`);
    await tab.waitForFunction("window.outcome", null, { timeout: 60_000 });
    const outcome = await tab.evaluate("window.outcome");
    assert.ok(outcome.tokens > 0 && outcome.chunks > 0 && outcome.bytes > 1000, JSON.stringify(outcome));
    assert.equal(outcome.text, "");
} finally {
    await browser.close();
    pages.close();
}
