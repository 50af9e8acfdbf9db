// Audio worklets of the page, run by the browser's audio thread: `player` and `microphone`.

const RATE = 24000;
const BLOCK = 960; // samples that the microphone sends at once: 40 ms

/** Plays clips one after the other, as their samples arrive, and counts what was played of each.
 *
 * In: {play: id, samples: Float32Array}, {end: id} after the last samples of a clip, {flush: number}.
 * Out: {started: id}, {ended: id, gaps}, and {flushed: number, clips: [{id, samples}]} with the clips that were
 * cut. A flush fades out within one block of the browser (5 ms), so that it does not click.
 */
class Player extends AudioWorkletProcessor {
    constructor() {
        super();
        this.clips = []; // {id, parts, offset, samples, gaps, isWaiting, isComplete}
        this.flush = null;
        this.port.onmessage = ({ data }) => {
            if (data.flush !== undefined) this.flush = data.flush;
            else if (data.play !== undefined) this.clip(data.play).parts.push(data.samples);
            else this.clip(data.end).isComplete = true;
        };
    }

    clip(id) {
        let clip = this.clips.find((each) => each.id === id);
        if (!clip) {
            clip = { id, parts: [], offset: 0, samples: 0, gaps: 0, isWaiting: false, isComplete: false };
            this.clips.push(clip);
        }
        return clip;
    }

    process(_inputs, outputs) {
        const output = outputs[0][0];
        let filled = 0;
        while (this.clips.length && filled < output.length) {
            const clip = this.clips[0];
            if (clip.parts.length) filled += this.copy(clip, output.subarray(filled));
            else if (clip.isComplete) {
                this.port.postMessage({ ended: clip.id, gaps: clip.gaps });
                this.clips.shift();
            } else {
                if (clip.samples && !clip.isWaiting) clip.gaps += 1;
                clip.isWaiting = true;
                break;
            }
        }
        if (this.flush !== null) {
            for (let i = 0; i < output.length; i++) output[i] *= 1 - (i + 1) / output.length;
            const clips = this.clips.map(({ id, samples }) => ({ id, samples }));
            this.port.postMessage({ flushed: this.flush, clips });
            this.clips = [];
            this.flush = null;
        }
        return true;
    }

    /** Copies what fits of the first part. Returns the number of samples. */
    copy(clip, output) {
        if (!clip.samples) this.port.postMessage({ started: clip.id });
        const part = clip.parts[0];
        const count = Math.min(output.length, part.length - clip.offset);
        output.set(part.subarray(clip.offset, clip.offset + count));
        clip.samples += count;
        clip.offset += count;
        clip.isWaiting = false;
        if (clip.offset === part.length) {
            clip.parts.shift();
            clip.offset = 0;
        }
        return count;
    }
}

/** Sends {samples: Int16Array, level} for every 40 ms at 24 kHz; `level` is the RMS, 0 to 1.
 *
 * A browser that cannot capture at 24 kHz runs this at the rate of the device; then a windowed sinc resamples.
 */
class Microphone extends AudioWorkletProcessor {
    constructor() {
        super();
        this.block = new Int16Array(BLOCK);
        this.length = 0;
        this.power = 0;
        this.step = sampleRate / RATE; // input samples an output sample
        this.reach = Math.ceil(16 * Math.max(1, this.step)); // input samples on each side of an output sample
        this.input = new Float32Array(this.reach); // what the next output samples still need
        this.position = this.reach; // of the next output sample in `input`
    }

    process(inputs) {
        const samples = inputs[0][0];
        if (!samples) return true;
        if (this.step === 1) for (const sample of samples) this.add(sample);
        else this.resample(samples);
        return true;
    }

    resample(samples) {
        const input = new Float32Array(this.input.length + samples.length);
        input.set(this.input);
        input.set(samples, this.input.length);
        const scale = 1 / Math.max(1, this.step);
        for (; this.position + this.reach < input.length; this.position += this.step) {
            const first = Math.ceil(this.position - this.reach);
            let sum = 0;
            for (let i = first; i <= this.position + this.reach; i++) {
                const distance = i - this.position;
                const x = Math.PI * distance * scale;
                const window = 0.5 + 0.5 * Math.cos((Math.PI * distance) / this.reach);
                sum += input[i] * window * scale * (x ? Math.sin(x) / x : 1);
            }
            this.add(sum);
        }
        const used = Math.floor(this.position) - this.reach;
        this.input = input.slice(used);
        this.position -= used;
    }

    add(sample) {
        const bounded = Math.max(-1, Math.min(1, sample));
        this.block[this.length++] = Math.round(bounded * 32767);
        this.power += bounded * bounded;
        if (this.length < BLOCK) return;
        const level = Math.sqrt(this.power / BLOCK);
        this.port.postMessage({ samples: this.block, level }, [this.block.buffer]);
        this.block = new Int16Array(BLOCK);
        this.length = 0;
        this.power = 0;
    }
}

registerProcessor("player", Player);
registerProcessor("microphone", Microphone);
