// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

var (
	errEarly   = errors.New("it changed the protocol before it had the whole request")
	errUnasked = errors.New("it changed the protocol unasked, or without saying to which")

	// errUpgraded tells httputil.ReverseProxy that there is nothing left to answer.
	errUpgraded = errors.New("the connection was upgraded")
)

// upgrade passes on that the server has changed the protocol, and moves bytes as a connection
// to the port does, until both directions ended or ctx does: httputil.ReverseProxy's own tunnel
// passes on no reset. The upgraded connection begins behind the request (RFC 9110, section 7.8).
// Until written, http.Transport still reads the request's body from the buffer in which that
// beginning is. It returns errUpgraded, or why the change is refused.
func (r *Router) upgrade(ctx context.Context, w http.ResponseWriter, resp *http.Response, body *upload, written schedule.Signal, server link.Stream) error {
	if _, changed := resp.Body.(io.Writer); !changed || resp.Request.Header.Get("Upgrade") == "" {
		return errUnasked
	}
	waiting, cancel := context.WithTimeout(resp.Request.Context(), r.opt.HeaderTimeout)
	defer cancel()
	select {
	case <-written:
	case <-waiting.Done():
		return errEarly
	}
	if !body.whole() {
		return errEarly
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	r.count(resultOK)
	var head bytes.Buffer // http.Response would write a Content-Length
	fmt.Fprintf(&head, "HTTP/1.1 %s\r\n", resp.Status)
	_ = resp.Header.Write(&head)
	head.WriteString("\r\n")
	client := conn.(*accepted).TCPConn
	early := io.LimitReader(rw, int64(rw.Reader.Buffered())) // what http.Server has read behind the request
	_ = forward.Splice(ctx,
		&fromClient{TCPConn: client, all: io.MultiReader(early, client)},
		&fromServer{Stream: server, all: io.MultiReader(&head, resp.Body)}, nil)
	return errUpgraded
}

// fromClient is a connection of which the beginning was read before.
type fromClient struct {
	*net.TCPConn
	all io.Reader
}

// Read implements net.Conn.
func (c *fromClient) Read(b []byte) (int, error) { return c.all.Read(b) }

// fromServer is the same of a connection to a server.
type fromServer struct {
	link.Stream
	all io.Reader
}

// Read implements net.Conn.
func (c *fromServer) Read(b []byte) (int, error) { return c.all.Read(b) }

// AwaitReset is forward.AwaitReset of the connection to the server.
func (c *fromServer) AwaitReset() error { return forward.AwaitReset(c.Stream) }
