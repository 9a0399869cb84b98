// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/run/exec"
	"github.com/fairlead/fairlead/internal/wire"
)

// session is a stream and its job.
type session struct {
	stream link.Stream
	job    *exec.Job
	leave  func()     // called when nothing is left of the job, before that is reported: the next may begin
	write  sync.Mutex // held while a frame is sent

	mu    sync.Mutex
	stdin []byte // received and not taken
	taken int    // by the goroutine that writes it, and not written
	ended bool   // no more will be received
	over  bool   // the job has ended: what is received is dropped
	wake  chan struct{}
}

// serve carries everything between stream and job until the job has ended. How is for the log.
func (c *session) serve(ctx context.Context) (how string, gone bool, err error) {
	_ = c.stream.SetDeadline(time.Time{}) // that of the request
	if c.send(Answer, encode(Reply{Granted: true})[1:]) != nil {
		c.job.Kill()
	}
	stop := context.AfterFunc(ctx, func() {
		c.job.Kill()
		_ = c.stream.Reset() // nobody waits for a client that does not read
	})
	defer stop()
	var reader, outputs, feeder sync.WaitGroup
	var left, done atomic.Bool
	reader.Go(func() {
		c.receiveAll()
		if done.Load() { // a reset could overtake what was sent last
			return
		}
		left.Store(true)
		c.job.Kill()
		_ = c.stream.Reset() // nobody reads any more
	})
	outputs.Go(func() { c.copy(Stdout, c.job.Stdout) })
	outputs.Go(func() { c.copy(Stderr, c.job.Stderr) })
	feeder.Go(c.feed)
	code, signal, err := c.job.Wait()
	gone = left.Load() && ctx.Err() == nil
	c.drop()
	outputs.Wait()
	if err == nil {
		c.leave()
	}
	how = "exit " + strconv.Itoa(code)
	switch {
	case err != nil:
		_ = c.send(Answer, encode(Reply{Error: &Refusal{"program", "how it ended is not known; the host's log says why"}})[1:])
	case signal != "":
		how = "SIG" + signal
		fallthrough
	default:
		_ = c.send(Exit, encode(Ended{Code: code, Signal: linuxSignal(signal)}))
	}
	done.Store(true)
	_ = c.stream.Close() // which ends the reader
	reader.Wait()
	feeder.Wait()
	return how, gone, err
}

func (c *session) send(kind byte, content []byte) error {
	c.write.Lock()
	defer c.write.Unlock()
	return wire.WriteRunFrame(c.stream, kind, content)
}

// receiveAll reads what the agent sends, until it has gone or sends what it must not.
func (c *session) receiveAll() {
	for {
		kind, content, err := wire.ReadRunFrame(c.stream)
		if err != nil {
			return
		}
		switch kind {
		case Stdin:
			if !c.put(content) {
				return
			}
		case StdinEnd:
			c.end()
		case Signal:
			// One that this system does not have, as on Windows, is ignored.
			if err := c.job.Signal(string(content)); errors.Is(err, exec.ErrStuck) {
				return
			}
		default:
			return
		}
	}
}

// put keeps a part of stdin, unless there is more than the agent may have sent.
func (c *session) put(b []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return true
	}
	if c.ended || len(c.stdin)+c.taken+len(b) > Window {
		return false
	}
	c.stdin = append(c.stdin, b...)
	c.notify()
	return true
}

// end notes that no more of stdin comes.
func (c *session) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.notify()
}

// drop notes that the job has ended. The agent cannot know it yet: what it sent meanwhile, and
// what was not taken, is for nobody.
func (c *session) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over, c.ended, c.stdin = true, true, nil
	c.notify()
}

func (c *session) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// feed writes stdin to the job until the agent has sent its end, or the job has ended. What a
// job does not want to read is dropped.
func (c *session) feed() {
	defer func() { _ = c.job.Stdin.Close() }()
	for range c.wake {
		c.mu.Lock()
		b, ended := c.stdin, c.ended
		c.stdin, c.taken = nil, len(b)
		c.mu.Unlock()
		if len(b) > 0 {
			_, _ = c.job.Stdin.Write(b)
			c.mu.Lock()
			c.taken = 0
			c.mu.Unlock()
			_ = c.send(Taken, strconv.AppendInt(nil, int64(len(b)), 10))
		}
		if ended {
			return
		}
	}
}

// copy sends what a job writes until its end.
func (c *session) copy(kind byte, from io.Reader) {
	buf := make([]byte, maxChunk)
	for {
		n, err := from.Read(buf)
		if n > 0 && c.send(kind, buf[:n]) != nil || err != nil {
			return
		}
	}
}
