// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/kit/enclave"
)

// dockerd is Debian's engine in this enclave, and a client of its API.
type dockerd struct {
	cmd    *exec.Cmd
	log    string
	client *http.Client
	events <-chan dockerEvent
	stop   context.CancelFunc
}

// dockerEvent is the start of a container.
type dockerEvent struct {
	Actor    struct{ ID string }
	TimeNano int64 `json:"timeNano"`
}

// startDocker starts the engine, and waits until it answers and has the image; the
// caller closes it.
func startDocker(ctx context.Context, e *Env) (_ *dockerd, err error) {
	dir, err := e.Dir()
	if err != nil {
		return nil, err
	}
	d := &dockerd{log: filepath.Join(dir, "log"), client: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", enclave.DockerSocket)
		},
	}}}
	out, err := os.Create(d.log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }()
	args := enclave.Dockerd()
	d.cmd = exec.Command(args[0], args[1:]...)
	d.cmd.Stdout, d.cmd.Stderr = out, out
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s, which hack/provision-engines.sh provides: %w", args[0], err)
	}
	ctx, d.stop = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			b, _ := os.ReadFile(d.log)
			err = fmt.Errorf("%w; the end of dockerd's output:\n%s", err, b[max(0, len(b)-1000):])
			d.close()
		}
	}()
	e.Progress("waiting for dockerd")
	for range 4 { // it takes longer where the machine has much to do
		if err = eventually(ctx, func() error { return d.ask(ctx, http.MethodGet, "/_ping", nil, nil) }); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	image, err := enclave.ImageArchive(dir)
	if err != nil {
		return nil, err
	}
	tar, err := os.Open(image)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tar.Close() }()
	if err := d.ask(ctx, http.MethodPost, "/images/load", tar, nil); err != nil {
		return nil, err
	}
	return d, d.watch(ctx)
}

func (d *dockerd) close() {
	d.stop()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	_ = d.cmd.Wait()
}

// send asks the engine; body is an io.Reader, or sent as JSON. The caller closes
// what is answered.
func (d *dockerd) send(ctx context.Context, method, path string, body any) (io.ReadCloser, error) {
	kind, in := "application/x-tar", io.Reader(nil)
	switch b := body.(type) {
	case nil:
	case io.Reader:
		in = b
	default:
		text, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		kind, in = "application/json", bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", kind)
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		return nil, fmt.Errorf("docker: %s %s: %s: %.300s", method, path, resp.Status, b)
	}
	return resp.Body, nil
}

// ask is send with all of the answer, which is JSON if it is wanted.
func (d *dockerd) ask(ctx context.Context, method, path string, body, answer any) error {
	in, err := d.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(in)
	err = errors.Join(err, in.Close())
	if err == nil && answer != nil {
		err = json.Unmarshal(b, answer)
	}
	return err
}

// watch subscribes to the starts of containers until ctx ends.
func (d *dockerd) watch(ctx context.Context) error {
	in, err := d.send(ctx, http.MethodGet, "/events?filters="+url.QueryEscape(`{"type":["container"],"event":["start"]}`), nil)
	if err != nil {
		return err
	}
	events := make(chan dockerEvent, 1)
	d.events = events
	go func() {
		defer close(events)
		defer func() { _ = in.Close() }()
		for dec := json.NewDecoder(in); ; {
			var ev dockerEvent
			if dec.Decode(&ev) != nil {
				return
			}
			select {
			case events <- ev:
			case <-ctx.Done():
				return
			}
		}
	}()
	return nil
}

// run starts a container with a web server at an address of the guest: one that it
// publishes, or its own if it has the host's network. It says when it was started,
// by the engine's event.
func (d *dockerd) run(ctx context.Context, name string, at netip.AddrPort, host bool) (id string, started time.Time, err error) {
	type object = map[string]any
	config := object{"Image": enclave.Image, "Cmd": []string{"httpd", "-f", "-p", at.String()}, "HostConfig": object{"NetworkMode": "host"}}
	if !host {
		config["Cmd"] = []string{"httpd", "-f", "-p", "80"}
		config["ExposedPorts"] = object{"80/tcp": object{}}
		config["HostConfig"] = object{"PortBindings": object{"80/tcp": []object{{"HostIp": at.Addr().String(), "HostPort": fmt.Sprint(at.Port())}}}}
	}
	var made struct{ ID string }
	if err := d.ask(ctx, http.MethodPost, "/containers/create?name="+name, config, &made); err != nil {
		return "", started, err
	}
	if err := d.ask(ctx, http.MethodPost, "/containers/"+made.ID+"/start", nil, nil); err != nil {
		return "", started, err
	}
	for {
		select {
		case ev, ok := <-d.events:
			if !ok {
				return "", started, errors.New("docker: the stream of events has ended")
			}
			if ev.Actor.ID == made.ID {
				return made.ID, time.Unix(0, ev.TimeNano), nil
			}
		case <-time.After(limit):
			return "", started, fmt.Errorf("docker: no event says that %s was started", name)
		}
	}
}

func (d *dockerd) remove(ctx context.Context, id string) error {
	return d.ask(ctx, http.MethodDelete, "/containers/"+id+"?force=1", nil, nil)
}

// poll lists all containers until one that publishes a port has that name, from a
// moment of its own within an interval on. The channel is closed if the engine does
// not answer.
func (d *dockerd) poll(ctx context.Context, name string, every time.Duration) <-chan time.Time {
	seen := make(chan time.Time, 1)
	go func() {
		defer close(seen)
		for next := rand.N(every); pause(ctx, next) == nil; next = every {
			var all []struct {
				Names []string
				Ports []struct{ PublicPort uint16 }
			}
			if d.ask(ctx, http.MethodGet, "/containers/json", nil, &all) != nil {
				return
			}
			for _, c := range all {
				if slices.ContainsFunc(c.Names, func(n string) bool { return strings.TrimPrefix(n, "/") == name }) && len(c.Ports) > 0 {
					seen <- time.Now()
					return
				}
			}
		}
	}()
	return seen
}
