// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Client queries a running agent or host over its control socket.
type Client struct {
	path     string
	http     *http.Client
	patience time.Duration // how long an answer may take in addition to what the request may
}

// NewClient returns a client of the control socket at path. Each call makes a connection.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		if err := link.TrustedPeer(conn); err != nil {
			return nil, errors.Join(errUntrusted{err}, conn.Close())
		}
		return conn, nil
	}
	return &Client{path: path, patience: answerTimeout, http: &http.Client{Transport: &http.Transport{
		DialContext: dial, DisableKeepAlives: true, MaxResponseHeaderBytes: maxHeader,
	}}}
}

// answerTimeout is a client's patience.
const answerTimeout = 5 * time.Second

// errSilent is returned when a process has the control socket and does not answer.
type errSilent struct{ waited time.Duration }

func (e errSilent) Error() string {
	return fmt.Sprintf("no answer within %s: the process is stopped, overloaded or out of file descriptors; see its log", e.waited)
}

// errUntrusted is returned when another user serves the socket, who could answer anything.
type errUntrusted struct{ error }

// ErrNotRunning is returned when nothing listens on the control socket.
var ErrNotRunning = errors.New("not running: start " + whatToStart(runtime.GOOS))

// whatToStart names the commands that serve a control socket on a system.
func whatToStart(goos string) string {
	if goos == "linux" {
		return "`fairlead agent` in the guest, or `fairlead host` on the host"
	}
	return "`fairlead host`"
}

// whoMay names who may connect to a control socket.
func whoMay(path string) string {
	if path == config.DefaultAgent().Control {
		return "root"
	}
	return "root or as the user who started it"
}

// errNotFound is the answer of a process that has no such route: an agent or a host of
// another version, or of the other role.
var errNotFound = errors.New("it does not answer this question: it is of the other role (agent or host), or of another version")

// do sends a request and returns the answer, whose first bytes come within a time.
func (c *Client) do(ctx context.Context, method, path, text string, within time.Duration) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := func() { cancel(nil) } // else ctx is kept by the caller's
	defer func() { done() }()
	silent := time.AfterFunc(within, func() { cancel(errSilent{within}) })
	defer silent.Stop()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+clientHost+path, strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(text, "{") {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	var untrusted errUntrusted
	switch {
	case errors.As(err, &untrusted):
		return nil, fmt.Errorf("control socket %s: %w", c.path, untrusted)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("control socket %s: %w: run as %s", c.path, fs.ErrPermission, whoMay(c.path))
	case errors.As(context.Cause(ctx), new(errSilent)), errors.Is(err, syscall.EAGAIN): // EAGAIN: too many wait to be accepted
		return nil, fmt.Errorf("control socket %s: %w", c.path, errSilent{within})
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("control socket %s: %w", c.path, ErrNotRunning)
	case resp.StatusCode == http.StatusNotFound:
		return nil, errors.Join(fmt.Errorf("control socket %s: %w", c.path, errNotFound), resp.Body.Close())
	case resp.StatusCode == http.StatusConflict: // a refusal that says all
		defer func() { _ = resp.Body.Close() }()
		line, _ := io.ReadAll(io.LimitReader(resp.Body, maxBody))
		return nil, errors.New(strings.TrimSpace(string(line)))
	case resp.StatusCode != http.StatusOK:
		defer func() { _ = resp.Body.Close() }()
		line, _ := io.ReadAll(io.LimitReader(resp.Body, maxBody))
		return nil, fmt.Errorf("control socket %s: %s", c.path, strings.TrimSpace(string(line)))
	}
	resp.Body = body{resp.Body, done}
	done = func() {}
	return resp, nil
}

// body is that of an answer. Close ends the context of its request.
type body struct {
	io.ReadCloser
	done func()
}

// Close implements io.Closer.
func (b body) Close() error {
	defer b.done()
	return b.ReadCloser.Close()
}

// ask sends a body, as JSON unless it is nil, and decodes a JSON answer, which may take as
// long as work on the way.
func ask[T any](ctx context.Context, c *Client, method, path string, body any, work time.Duration) (v T, err error) {
	text := ""
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return v, err
		}
		text = string(b)
	}
	err = c.answer(ctx, method, path, text, work, func(r io.Reader) error { return json.NewDecoder(r).Decode(&v) })
	return v, err
}

// answer sends a request, and has read read the answer.
func (c *Client) answer(ctx context.Context, method, path, text string, work time.Duration, read func(io.Reader) error) error {
	within := work + c.patience
	resp, err := c.do(ctx, method, path, text, within)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	silent := time.AfterFunc(within, func() { _ = resp.Body.Close() })
	err = read(resp.Body)
	switch late := !silent.Stop(); {
	case err != nil && late:
		return fmt.Errorf("control socket %s: %w", c.path, errSilent{within})
	case err != nil:
		return fmt.Errorf("control socket %s: %w", c.path, err)
	}
	return nil
}

// List returns the current state.
func (c *Client) List(ctx context.Context) (List, error) {
	return ask[List](ctx, c, http.MethodGet, "/v1/ports", nil, 0)
}

// Watch calls f with each event until ctx ends, f fails, or the connection is lost
// (io.ErrUnexpectedEOF).
func (c *Client) Watch(ctx context.Context, f func(Event) error) error {
	return follow(ctx, c, "/v1/watch", func() {}, f)
}

// follow calls begun when the answer begins, and f with each of its values until ctx ends,
// f fails, or the connection is lost (io.ErrUnexpectedEOF).
func follow[T any](ctx context.Context, c *Client, path string, begun func(), f func(T) error) error {
	resp, err := c.do(ctx, http.MethodGet, path, "", c.patience)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	begun()
	dec := json.NewDecoder(resp.Body)
	for {
		var v T
		if err := dec.Decode(&v); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("control socket %s: %w", c.path, io.ErrUnexpectedEOF)
		}
		if err := f(v); err != nil {
			return err
		}
	}
}

// LogLevel returns the level, and sets it first if level is not empty: permanently, or
// for a time if lasts is not 0 (1s to 24h).
func (c *Client) LogLevel(ctx context.Context, level string, lasts time.Duration) (string, error) {
	method, path := http.MethodGet, "/v1/loglevel"
	if level != "" {
		method = http.MethodPut
	}
	if lasts != 0 {
		path += "?for=" + lasts.String()
	}
	var answer []byte
	err := c.answer(ctx, method, path, level, 0, func(r io.Reader) (err error) {
		answer, err = io.ReadAll(io.LimitReader(r, maxBody))
		return err
	})
	return strings.TrimSpace(string(answer)), err
}

// LogLevels returns the levels in effect.
func (c *Client) LogLevels(ctx context.Context) (loglevel.State, error) {
	return ask[loglevel.State](ctx, c, http.MethodGet, "/v1/loglevels", nil, 0)
}

// SetLogLevels sets levels of components, and returns those in effect.
func (c *Client) SetLogLevels(ctx context.Context, r loglevel.Request) (loglevel.State, error) {
	return ask[loglevel.State](ctx, c, http.MethodPut, "/v1/loglevels", r, 0)
}

// awaitPause is between two attempts of Await.
const awaitPause = 50 * time.Millisecond

// Await is List for an agent that may be restarting: while it is not running, or not
// all sources have reported, it retries for the given time, and then returns the last
// result.
func (c *Client) Await(ctx context.Context, timeout time.Duration) (l List, err error) {
	for deadline := time.Now().Add(timeout); ; {
		l, err = c.List(ctx)
		if err == nil && l.Ready() || err != nil && !errors.Is(err, ErrNotRunning) || time.Now().After(deadline) {
			return l, err
		}
		if err := schedule.Sleep(ctx, awaitPause); err != nil {
			return l, err
		}
	}
}
